#include "runtime/command/page/blocks.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>

#include "allocator/preload/events.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/page/text.h"

namespace forebay {
namespace {

// The drawing's own units. A row is stretched to the width of the page.
constexpr std::uint64_t kRowWidth = 1600;
constexpr std::uint64_t kRowHeight = 20;
constexpr std::uint64_t kBarHeight = 17;
constexpr std::uint64_t kRows = 24;
// Blocks narrower than this share a piece of the drawing: some 400 pieces in a row at most.
constexpr std::uint64_t kPieceWidth = 4;
constexpr std::size_t kStreamColors = 7;  // The streams with the most memory; the others share one.
constexpr std::size_t kPiecesNamed = 5;

bool is_free(const PageBlock& block) {
  return block.state == PageBlockState::kFree;
}

// Indices of colours: 0 to 6 streams, 7 the other streams, 8 free blocks, then addresses without a block.
constexpr std::size_t kOthers = kStreamColors;
constexpr std::size_t kFreeColor = kStreamColors + 1;
constexpr std::size_t kGapColor = kStreamColors + 2;

// A piece of the drawing: a block, or several that are too narrow to be told apart.
struct Piece {
  std::uint64_t begin = 0;  // In units, rows one after another.
  std::uint64_t width = 0;
  std::size_t first = 0;  // Index of the first block.
  std::size_t count = 0;  // 0: a gap before the block.
  std::size_t color = 0;
  bool pending = false;
  bool elsewhere = false;  // Served by somebody else than the arena.
  std::uint64_t bytes = 0;
  std::uint64_t free_bytes = 0;
};

class Map {
 public:
  Map(const PageMoment& moment, std::vector<PageBlock> blocks)
      : moment_(moment), blocks_(std::move(blocks)), free_(free_pieces(blocks_)) {
    const std::uint64_t shown = largest_gap_shown();
    offsets_.reserve(blocks_.size());
    double end = 0;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (gap_before(i) > shown) {
        cuts_.push_back(i);
      } else {
        end += static_cast<double>(gap_before(i));
      }
      offsets_.push_back(end);
      end += static_cast<double>(blocks_[i].bytes);
    }
    choose_rows(end);
    choose_colors();
    make_pieces();
  }

  std::string html() const {
    std::string text = "<figure class=\"blocks\">\n<figcaption>Blocks " + html_text(moment_.name) +
                       "</figcaption>\n<p>" + summary() + "</p>\n";
    const std::string height = std::to_string(rows_ * kRowHeight);
    text +=
        "<div class=\"plot\" tabindex=\"0\" role=\"slider\" aria-label=\"Blocks in the order of addresses. "
        "Arrow keys move from block to block and from row to row.\" aria-valuemin=\"0\" aria-valuemax=\"" +
        std::to_string(pieces_.size() - 1) + "\" aria-valuenow=\"0\">\n<svg viewBox=\"0 0 " +
        std::to_string(kRowWidth) + " " + height + "\" style=\"height:" + std::to_string(rows_ * 5 / 4 + 1) +
        "rem\" preserveAspectRatio=\"none\" aria-hidden=\"true\">" + drawing() +
        "<path class=\"cursor\" d=\"\"/></svg>" + letters() + "</div>\n";
    text += "<p class=\"readout\" aria-live=\"off\">A row is " + row_text() +
            "; addresses grow to the right, then downwards." + seams_text() + "</p>\n";
    return text + legend() + pieces_table() + data() + "</figure>\n";
  }

 private:
  std::uint64_t unit(double offset) const {
    return static_cast<std::uint64_t>(offset / row_bytes_ * static_cast<double>(kRowWidth));
  }
  std::uint64_t begin_of(std::size_t block) const { return unit(offsets_[block]); }
  std::uint64_t end_of(std::size_t block) const {
    return unit(offsets_[block] + static_cast<double>(blocks_[block].bytes));
  }
  std::uint64_t width_of(std::size_t block) const { return end_of(block) - begin_of(block); }

  // Addresses between the block and the one before it that no block has.
  std::uint64_t gap_before(std::size_t block) const {
    if (block == 0) return 0;
    const PageBlock& before = blocks_[block - 1];
    return blocks_[block].address - (before.address + before.bytes);
  }
  // Gaps are drawn in their size, the smaller ones first, until they take as much room as the blocks; larger
  // ones are cut out.
  std::uint64_t largest_gap_shown() const {
    std::vector<std::uint64_t> gaps;
    double room = 0;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      gaps.push_back(gap_before(i));
      room += static_cast<double>(blocks_[i].bytes);
    }
    std::sort(gaps.begin(), gaps.end());
    std::uint64_t largest = 0;
    for (const std::uint64_t gap : gaps) {
      room -= static_cast<double>(gap);
      if (room < 0) break;
      largest = gap;
    }
    return largest;
  }

  // Few blocks need few rows. A row is a power of two of bytes, or all bytes.
  void choose_rows(double bytes) {
    const std::uint64_t wanted = std::min<std::uint64_t>(kRows, 1 + blocks_.size() / 8);
    row_bytes_ = bytes;
    rows_ = 1;
    if (wanted == 1) return;
    row_bytes_ = std::exp2(std::ceil(std::log2(bytes / static_cast<double>(wanted))));
    rows_ = static_cast<std::uint64_t>(std::ceil(bytes / row_bytes_));
  }

  void choose_colors() {
    std::unordered_map<std::uint64_t, std::uint64_t> bytes;
    for (const PageBlock& block : blocks_) {
      if (!is_free(block)) bytes[block.stream] += block.bytes;
    }
    streams_.assign(bytes.begin(), bytes.end());
    std::sort(streams_.begin(), streams_.end(), [](const auto& a, const auto& b) {
      return a.second != b.second ? a.second > b.second : a.first < b.first;
    });
    for (std::size_t i = 0; i < streams_.size(); ++i) color_[streams_[i].first] = std::min(i, kOthers);
  }
  std::size_t color_of(const PageBlock& block) const {
    return is_free(block) ? kFreeColor : color_.at(block.stream);
  }

  void make_pieces() {
    for (std::size_t begin = 0; begin < blocks_.size();) {
      add_gap(begin);
      std::size_t after = begin + 1;
      // Narrow ones together, up to one that can stand alone.
      while (width_of(begin) < kPieceWidth && after < blocks_.size() &&
             end_of(after - 1) - begin_of(begin) < kPieceWidth && width_of(after) < kPieceWidth &&
             begin_of(after) - end_of(after - 1) < kPieceWidth) {
        ++after;
      }
      add_piece(begin, after);
      begin = after;
    }
  }

  void add_gap(std::size_t block) {
    if (block == 0 || begin_of(block) - end_of(block - 1) < kPieceWidth) return;
    const std::uint64_t begin = end_of(block - 1);
    pieces_.push_back({.begin = begin,
                       .width = begin_of(block) - begin,
                       .first = block,
                       .color = kGapColor,
                       .bytes = gap_before(block)});
    any_gap_ = true;
  }

  void add_piece(std::size_t begin, std::size_t after) {
    Piece piece{.begin = begin_of(begin), .first = begin, .count = after - begin};
    piece.begin = std::min(piece.begin, rows_ * kRowWidth - 1);
    piece.width = std::max(end_of(after - 1), piece.begin + 1) - piece.begin;
    std::uint64_t bytes_of_color[kFreeColor + 1] = {};
    std::uint64_t pending_bytes = 0, elsewhere_bytes = 0;
    for (std::size_t i = begin; i < after; ++i) {
      const PageBlock& block = blocks_[i];
      piece.bytes += block.bytes;
      bytes_of_color[color_of(block)] += block.bytes;
      if (block.state == PageBlockState::kPending) pending_bytes += block.bytes;
      if (!is_free(block) && block.server != PreloadServer::kArena) elsewhere_bytes += block.bytes;
    }
    piece.free_bytes = bytes_of_color[kFreeColor];
    // The colour with the most bytes.
    piece.color = static_cast<std::size_t>(
        std::max_element(std::begin(bytes_of_color), std::end(bytes_of_color)) - bytes_of_color);
    piece.pending = pending_bytes > piece.bytes / 2;
    piece.elsewhere = elsewhere_bytes > piece.bytes / 2;
    any_pending_ |= pending_bytes > 0;
    any_elsewhere_ |= elsewhere_bytes > 0;
    pieces_.push_back(piece);
  }

  // A rectangle for each row that the units touch. With `low`: only a line at the rows' feet.
  static std::string bars(std::uint64_t begin, std::uint64_t width, bool low) {
    std::string path;
    for (const std::uint64_t end = begin + width; begin < end;) {
      const std::uint64_t row = begin / kRowWidth;
      const std::uint64_t stop = std::min(end, (row + 1) * kRowWidth);
      const std::uint64_t height = low ? 4 : kBarHeight;
      path += "M" + std::to_string(begin % kRowWidth) + " " +
              std::to_string(row * kRowHeight + kBarHeight - height) + "h" + std::to_string(stop - begin) +
              "v" + std::to_string(height) + "h-" + std::to_string(stop - begin) + "z";
      begin = stop;
    }
    return path;
  }

  std::string drawing() const {
    std::map<std::string, std::string> paths;  // By class.
    for (const Piece& piece : pieces_) {
      if (piece.count == 0) continue;
      std::string kind = piece.color == kFreeColor ? "free" : "s" + std::to_string(piece.color);
      if (piece.pending) kind += " pending";
      paths[kind] += bars(piece.begin, piece.width, false);
      if (piece.elsewhere) paths["~elsewhere"] += bars(piece.begin, piece.width, true);
    }
    std::string text;
    for (const auto& [kind, path] : paths) {
      text += "<path class=\"" + (kind[0] == '~' ? kind.substr(1) : kind) + "\" d=\"" + path + "\"/>";
    }
    return text + "<path class=\"seam\" d=\"" + seams() + "\"/>";
  }

  std::string seams() const {
    std::string path;
    std::uint64_t last = UINT64_MAX;
    for (const std::size_t cut : cuts_) {
      if (begin_of(cut) == last) continue;
      last = begin_of(cut);
      path += "M" + std::to_string(last % kRowWidth) + " " + std::to_string(last / kRowWidth * kRowHeight) +
              "v" + std::to_string(kBarHeight);
    }
    return path;
  }
  std::string seams_text() const {
    if (cuts_.empty()) return "";
    return " Dark lines divide " + format_count(cuts_.size() + 1, "range") +
           " of addresses; the gaps between them are not shown.";
  }
  std::string row_text() const {
    return format_bytes(static_cast<std::uint64_t>(std::min(row_bytes_, 1e18)));
  }

  // The names of the largest free pieces, where they lie. Positions in percent: letters are not stretched.
  std::string letters() const {
    std::string text;
    for (std::size_t i = 0; i < named_count(); ++i) {
      const auto found = std::partition_point(blocks_.begin(), blocks_.end(), [&](const PageBlock& block) {
        return block.address < free_[i].address;
      });
      const auto first = static_cast<std::size_t>(found - blocks_.begin());
      const double begin = static_cast<double>(begin_of(first));
      const double width = static_cast<double>(free_[i].bytes) / row_bytes_ * static_cast<double>(kRowWidth);
      // In the middle of the piece's part in its first row.
      const auto row = static_cast<std::uint64_t>(begin) / kRowWidth;
      const double end = std::min(begin + width, static_cast<double>((row + 1) * kRowWidth));
      const double x = ((begin + end) / 2 - static_cast<double>(row * kRowWidth)) / kRowWidth * 100;
      const double y = static_cast<double>(2 * row * kRowHeight + kBarHeight) /
                       static_cast<double>(2 * rows_ * kRowHeight) * 100;
      text +=
          format_text("<b style=\"left:%.2f%%;top:%.2f%%\" aria-hidden=\"true\">", x, y) + letter(i) + "</b>";
    }
    return text;
  }
  std::size_t named_count() const { return std::min(free_.size(), kPiecesNamed); }
  static std::string letter(std::size_t i) { return std::string(1, static_cast<char>('A' + i)); }

  std::string summary() const {
    std::uint64_t free_bytes = 0;
    for (const FreePiece& piece : free_) free_bytes += piece.bytes;
    std::string text = (moment_.time_ns == 0 ? "" : "At " + time_text(moment_.time_ns) + ": ") +
                       format_bytes(moment_.requested_bytes) + " requested, " +
                       format_bytes(moment_.reserved_bytes) + " reserved. ";
    if (free_.empty()) {
      std::uint64_t bytes = 0;
      for (const PageBlock& block : blocks_) bytes += block.bytes;
      text += moment_.reserved_bytes > bytes
                  ? format_bytes(moment_.reserved_bytes - bytes) + " lay outside of these blocks."
                  : "Nothing was free.";
    } else {
      text += format_bytes(free_bytes) + " free in " + format_count(free_.size(), "piece") +
              ", the largest of " + format_bytes(free_.front().bytes) + ".";
    }
    if (moment_.asked_bytes == 0) return text;
    text += " Asked for: <strong>" + format_bytes(moment_.asked_bytes) + "</strong>";
    if (free_bytes < moment_.asked_bytes) {
      return text + ", " + format_bytes(moment_.asked_bytes - free_bytes) + " more than all that was free.";
    }
    if (!free_.empty() && free_.front().bytes < moment_.asked_bytes) {
      return text + ", which was free, but in no piece large enough.";
    }
    return text + ", although a free piece was large enough.";
  }

  std::string legend() const {
    std::string text = "<ul class=\"legend\">";
    std::uint64_t other_bytes = 0;
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      if (i >= kOthers) {
        other_bytes += streams_[i].second;
        continue;
      }
      text += "<li><i class=\"s" + std::to_string(i) + "\"></i>" + stream_text(streams_[i].first) + ", " +
              format_bytes(streams_[i].second) + "</li>";
    }
    if (other_bytes > 0) {
      text += "<li><i class=\"s7\"></i>" + format_count(streams_.size() - kOthers, "other stream") + ", " +
              format_bytes(other_bytes) + "</li>";
    }
    if (!free_.empty()) text += "<li><i class=\"free\"></i>free</li>";
    if (any_gap_) text += "<li><i class=\"gap\"></i>empty: addresses without a block</li>";
    if (any_pending_) text += "<li><i class=\"s0 pending\"></i>paler: freed, waiting for its stream</li>";
    if (any_elsewhere_) text += "<li><i class=\"elsewhere\"></i>underlined: not served by the arena</li>";
    return text + "</ul>\n";
  }

  static std::string stream_text(std::uint64_t stream) {
    return stream < kPreloadStreamLimit ? preload_stream_text(static_cast<std::uint16_t>(stream))
                                        : "stream " + address_text(stream);
  }

  std::string neighbour(std::size_t index) const {
    if (index == kNoBlock) return "the end of the addresses";
    const PageBlock& block = blocks_[index];
    std::string text = format_bytes(block.bytes) + ", " + stream_text(block.stream);
    if (block.order != 0) text += ", allocation " + std::to_string(block.order);
    if (block.state == PageBlockState::kPending) text += ", waiting for its stream";
    if (block.server != PreloadServer::kArena) text += std::string(", ") + preload_server_text(block.server);
    if (!holder_of(block).empty()) text += ", " + html_text(holder_of(block));
    return text;
  }

  const std::string& holder_of(const PageBlock& block) const {
    return moment_.holders[block.holder < moment_.holders.size() ? block.holder : 0];
  }

  std::string pieces_table() const {
    if (free_.empty()) return "";
    std::string text =
        "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Free pieces\"><table>\n<caption>The "
        "largest free pieces, and the blocks beside them</caption>\n"
        "<thead><tr><th scope=\"col\">Piece</th><th scope=\"col\" class=\"n\">Free</th><th "
        "scope=\"col\">Address</th><th scope=\"col\">Block before</th><th scope=\"col\">Block "
        "after</th></tr></thead>\n<tbody>\n";
    for (std::size_t i = 0; i < named_count(); ++i) {
      text += "<tr><th scope=\"row\">" + letter(i) + "</th><td class=\"n\">" + format_bytes(free_[i].bytes) +
              "</td><td class=\"a\">" + address_text(free_[i].address) + "</td><td>" +
              neighbour(free_[i].before) + "</td><td>" + neighbour(free_[i].after) + "</td></tr>\n";
    }
    return text + "</tbody></table></div>\n";
  }

  // Per piece: begin, width, address, bytes, blocks, free bytes; and of a block alone its stream, state,
  // order, server and, if it is known, its holder.
  std::string data() const {
    std::string text = "<script type=\"application/json\">{\"rowWidth\":" + std::to_string(kRowWidth) +
                       ",\"rowHeight\":" + std::to_string(kRowHeight) +
                       ",\"barHeight\":" + std::to_string(kBarHeight) + ",\"servers\":[";
    for (std::size_t i = 0; i < kPreloadServerCount; ++i) {
      text += std::string(i == 0 ? "\"" : ",\"") + preload_server_text(static_cast<PreloadServer>(i)) + "\"";
    }
    std::map<std::uint32_t, std::size_t> holders;  // By PageBlock::holder: its place in the list.
    text += "],\"holders\":[";
    for (const Piece& piece : pieces_) {
      const PageBlock& block = blocks_[piece.first];
      if (piece.count != 1 || is_free(block) || holder_of(block).empty()) continue;
      if (!holders.emplace(block.holder, holders.size()).second) continue;
      text += (holders.size() > 1 ? "," : "") + script_text(holder_of(block));
    }
    text += "],\"pieces\":[";
    for (const Piece& piece : pieces_) {
      const PageBlock& block = blocks_[piece.first];
      const std::uint64_t address = block.address - (piece.count == 0 ? piece.bytes : 0);
      text += (text.back() == '[' ? "[" : ",[") + std::to_string(piece.begin) + "," +
              std::to_string(piece.width) + ",\"" + address_text(address) + "\"," +
              std::to_string(piece.bytes) + "," + std::to_string(piece.count) + "," +
              std::to_string(piece.free_bytes);
      if (piece.count == 1 && !is_free(block)) {
        text += ",\"" + stream_text(block.stream) + "\"," +
                (block.state == PageBlockState::kPending ? "1" : "0") + "," + std::to_string(block.order) +
                "," + std::to_string(static_cast<unsigned>(block.server));
        const auto holder = holders.find(block.holder);
        if (holder != holders.end()) text += "," + std::to_string(holder->second);
      }
      text += "]";
    }
    return text + "]}</script>\n";
  }

  const PageMoment& moment_;
  const std::vector<PageBlock> blocks_;
  const std::vector<FreePiece> free_;
  std::vector<double> offsets_;    // The offset of each block in the drawing, in bytes.
  std::vector<std::size_t> cuts_;  // Blocks before which addresses are left out.
  double row_bytes_ = 1;
  std::uint64_t rows_ = 1;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> streams_;  // And their bytes, largest first.
  std::unordered_map<std::uint64_t, std::size_t> color_;          // By stream.
  std::vector<Piece> pieces_;
  bool any_gap_ = false;
  bool any_pending_ = false;
  bool any_elsewhere_ = false;
};

}  // namespace

std::vector<PageBlock> blocks_in_order(const std::vector<PageBlock>& blocks) {
  std::vector<PageBlock> sorted = blocks;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const PageBlock& a, const PageBlock& b) { return a.address < b.address; });
  std::vector<PageBlock> kept;
  std::uint64_t end = 0;
  for (PageBlock block : sorted) {
    // Up to the last address there can be.
    block.bytes = std::min(block.bytes, UINT64_MAX - block.address);
    const std::uint64_t cut = block.address < end ? std::min(end - block.address, block.bytes) : 0;
    block.address += cut;
    block.bytes -= cut;
    if (block.bytes == 0) continue;
    end = block.address + block.bytes;
    kept.push_back(block);
  }
  return kept;
}

std::vector<FreePiece> free_pieces(const std::vector<PageBlock>& blocks) {
  std::vector<FreePiece> pieces;
  const auto meet = [&](std::size_t i) {
    return i > 0 && i < blocks.size() && blocks[i - 1].address + blocks[i - 1].bytes == blocks[i].address;
  };
  for (std::size_t i = 0; i < blocks.size();) {
    if (!is_free(blocks[i])) {
      ++i;
      continue;
    }
    FreePiece piece{.address = blocks[i].address, .before = meet(i) ? i - 1 : kNoBlock};
    do {
      piece.bytes += blocks[i++].bytes;
    } while (meet(i) && is_free(blocks[i]));
    piece.after = meet(i) ? i : kNoBlock;
    pieces.push_back(piece);
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const FreePiece& a, const FreePiece& b) { return a.bytes > b.bytes; });
  return pieces;
}

std::string blocks_html(const PageMoment& moment) {
  std::vector<PageBlock> blocks = blocks_in_order(moment.blocks);
  if (blocks.empty()) {
    return "<p class=\"note\">No blocks were recorded " + html_text(moment.name) + ".</p>\n";
  }
  return Map(moment, std::move(blocks)).html();
}

}  // namespace forebay
