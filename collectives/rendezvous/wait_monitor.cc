#include "collectives/rendezvous/wait_monitor.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "collectives/rendezvous/byte_text.h"
#include "collectives/rendezvous/introduction.h"
#include "collectives/signal_mask.h"

namespace forebay::internal {
namespace {

// Further ranks are left out: each of them leads on in the wait graph.
constexpr std::size_t kReportedRanksMax = 64;
constexpr std::chrono::milliseconds kPoll{2};
// Reports that the store has not taken yet. Fewer: a slow store looks stopped. More: they fill the socket's
// buffer.
constexpr std::uint64_t kUnacknowledgedMax = 16;

}  // namespace

WaitMonitor::WaitMonitor(int rank, std::chrono::milliseconds deadline, std::shared_ptr<RendezvousStore> store,
                         std::string prefix)
    : rank_(rank),
      deadline_(deadline),
      reporting_(wait_reporting(deadline)),
      store_(std::move(store)),
      prefix_(std::move(prefix)) {}

Status WaitMonitor::start() {
  const BlockedSignals blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(StatusCode::kUnavailable, "rank ", rank_,
                  " cannot start a thread to watch its waits: ", error.what(), "; raise ulimit -u or -v");
  }
  return {};
}

WaitMonitor::~WaitMonitor() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  thread_.join();
  if (reported_ && store_->server_rank() < 0) store_->remove(name(rank_));
}

WaitMonitor::Waiting::Waiting(WaitMonitor& monitor, const Issued& issued, const std::string& group,
                              std::vector<int> ranks, std::function<void()> wake)
    : monitor_(monitor),
      issued_(issued),
      group_(group),
      wake_(std::move(wake)),
      begin_(Clock::now()),
      ranks_(std::move(ranks)) {
  const std::lock_guard lock(monitor_.mutex_);
  monitor_.waiting_.push_back(this);
}

WaitMonitor::Waiting::~Waiting() {
  const std::lock_guard lock(monitor_.mutex_);
  std::erase(monitor_.waiting_, this);
}

void WaitMonitor::Waiting::expect(std::vector<int> ranks) {
  const std::lock_guard lock(monitor_.mutex_);
  ranks_ = std::move(ranks);
}

void WaitMonitor::Waiting::came(int rank) {
  const std::lock_guard lock(monitor_.mutex_);
  std::erase(ranks_, rank);
}

void WaitMonitor::Waiting::finish(std::vector<int> ranks) {
  const std::lock_guard lock(monitor_.mutex_);
  ranks_ = std::move(ranks);
  came_ = true;
}

Status WaitMonitor::Waiting::verdict() const {
  const std::lock_guard lock(monitor_.mutex_);
  return verdict_;
}

Wait WaitMonitor::wait_of(const Waiting& waiting, Clock::time_point now) {
  return {.what = describe(waiting.issued_) + (waiting.group_.empty() ? "" : " ") + waiting.group_,
          .ranks = waiting.ranks_,
          .came = waiting.came_,
          .age = now - waiting.begin_};
}

void WaitMonitor::run() noexcept {
  for (;;) {
    try {
      const Clock::time_point now = Clock::now();
      {
        std::unique_lock lock(mutex_);
        Clock::time_point next = now + reporting_.period;
        // A wait that has a verdict only has to wake up.
        for (const Waiting* waiting : waiting_) {
          if (waiting->verdict_.ok() && !waiting->ranks_.empty())
            next = std::min(next, waiting->begin_ + deadline_);
        }
        changed_.wait_until(lock, next, [&] { return ending_; });
        if (ending_) return;
      }
      report(Clock::now());
      end_late_waits(Clock::now());
    } catch (const std::exception&) {
      // Out of memory: the next period tries again.
    }
  }
}

std::vector<Wait> WaitMonitor::own_waits(Clock::time_point now, std::chrono::nanoseconds age_min) {
  const std::lock_guard lock(mutex_);
  std::vector<Wait> waits;
  for (const Waiting* waiting : waiting_) {
    if (!waiting->ranks_.empty() && now - waiting->begin_ >= age_min) waits.push_back(wait_of(*waiting, now));
  }
  return waits;
}

void WaitMonitor::report(Clock::time_point now) {
  const WaitReport report{.waits = own_waits(now, reporting_.period)};
  if (report.waits.empty() && !reported_) return;
  reported_ = !report.waits.empty();
  if (reported_ || store_->server_rank() >= 0) {
    post(report);
  } else {
    store_->remove(name(rank_));
  }
}

void WaitMonitor::post(const WaitReport& report) {
  const std::lock_guard lock(post_mutex_);
  WaitReport next = report;
  next.number = report_number_ + 1;
  if (store_->server_rank() >= 0) {
    WaitReport taken;
    const std::optional<std::string> text = store_->posted(name(rank_));
    if (text) static_cast<void>(decode(*text, &taken));
    if (next.number > taken.number + kUnacknowledgedMax) return;
  }
  report_number_ = next.number;
  store_->post(name(rank_), encode(next));
}

bool WaitMonitor::is_acknowledged() {
  std::uint64_t wanted = 0;
  {
    const std::lock_guard lock(post_mutex_);
    wanted = report_number_;
  }
  WaitReport taken;
  const std::optional<std::string> text = store_->posted(name(rank_));
  return text && decode(*text, &taken) && taken.number >= wanted;
}

Status WaitMonitor::silent_server() {
  Status silent(StatusCode::kTimeout, "the ranks cannot reach the rendezvous store at ", store_->where(),
                ": rank ", store_->server_rank(),
                ", which serves it, did not answer; look there for the reason, or raise the deadline");
  store_->abandon(silent);
  return silent;
}

Status WaitMonitor::server_status() {
  const int server = store_->server_rank();
  if (server < 0 || server == rank_) return {};
  // One more report changes nothing for its readers, and shows whether the server sends it back.
  post({.waits = own_waits(Clock::now(), reporting_.period)});
  for (const Clock::time_point limit = Clock::now() + reporting_.validity; Clock::now() < limit;
       std::this_thread::sleep_for(kPoll)) {
    FOREBAY_RETURN_IF_ERROR(store_->status());
    if (is_acknowledged()) return {};
  }
  return silent_server();
}

std::vector<Wait> WaitMonitor::waits_of(int rank, Clock::time_point now) {
  if (rank == rank_) return own_waits(now, std::chrono::nanoseconds(0));
  WaitReport report;
  const std::optional<std::string> text = store_->posted(name(rank));
  if (!text || !decode(*text, &report)) return {};
  const auto [place, is_new] = seen_.try_emplace(rank, Seen{report, now});
  Seen& seen = place->second;
  if (!is_new && seen.report.number != report.number) seen = {std::move(report), now};
  if (now - seen.changed > reporting_.validity) return {};
  std::vector<Wait> waits = seen.report.waits;
  std::erase_if(waits, [](const Wait& wait) { return wait.ranks.empty(); });
  return waits;
}

void WaitMonitor::end_late_waits(Clock::time_point now) {
  // Two looks tell an old report from a new one, so the first look comes before the deadline.
  const std::chrono::nanoseconds first_look = deadline_ - 2 * reporting_.validity;
  for (const Wait& wait : own_waits(now, first_look)) {
    Status verdict = explain_timeout(rank_, wait, deadline_, [&](int rank) { return waits_of(rank, now); });
    if (wait.age < deadline_) continue;
    if (const Status server = server_status(); !server.ok()) verdict = server;
    const std::lock_guard lock(mutex_);
    for (Waiting* waiting : waiting_) {
      if (!waiting->verdict_.ok() || now - waiting->begin_ < deadline_) continue;
      waiting->verdict_ = verdict;
      waiting->wake_();
    }
    return;
  }
}

std::string encode(const WaitReport& report) {
  std::string bytes;
  append_number(bytes, report.number);
  const std::size_t count = std::min(report.waits.size(), kReportedWaitsMax);
  append_number(bytes, static_cast<std::uint8_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    const Wait& wait = report.waits[i];
    append_text(bytes, std::string_view(wait.what).substr(0, kWaitTextMax));
    append_number(bytes, static_cast<std::uint8_t>(wait.came));
    append_number(bytes, static_cast<std::uint64_t>(wait.age.count()));
    const std::size_t ranks = std::min(wait.ranks.size(), kReportedRanksMax);
    append_number(bytes, static_cast<std::uint8_t>(ranks));
    for (std::size_t r = 0; r < ranks; ++r) append_number(bytes, static_cast<std::uint32_t>(wait.ranks[r]));
  }
  return bytes;
}

bool decode(std::string_view bytes, WaitReport* report) {
  std::uint8_t count = 0;
  report->waits.clear();
  if (!take_number(&bytes, &report->number) || !take_number(&bytes, &count) || count > kReportedWaitsMax)
    return false;
  for (std::uint8_t i = 0; i < count; ++i) {
    Wait& wait = report->waits.emplace_back();
    std::uint8_t came = 0;
    std::uint64_t age = 0;
    std::uint8_t ranks = 0;
    if (!take_text(&bytes, kWaitTextMax, &wait.what) || !take_number(&bytes, &came) || came > 1 ||
        !take_number(&bytes, &age) || !take_number(&bytes, &ranks) || ranks > kReportedRanksMax)
      return false;
    wait.came = came != 0;
    wait.age = std::chrono::nanoseconds(static_cast<std::int64_t>(age));
    for (std::uint8_t r = 0; r < ranks; ++r) {
      std::uint32_t rank = 0;
      if (!take_number(&bytes, &rank) || rank >= static_cast<std::uint32_t>(kRanksMax)) return false;
      wait.ranks.push_back(static_cast<int>(rank));
    }
  }
  return bytes.empty();
}

}  // namespace forebay::internal
