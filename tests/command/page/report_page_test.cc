// The web page of a report: its content, its omissions, the escaping of all text, and its script in a real
// browser.
#include "runtime/command/page/report_page.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "allocator/preload/events.h"
#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/command/page/blocks.h"
#include "runtime/command/page/text.h"
#include "runtime/command/page/timeline.h"
#include "runtime/command/replay/trace_page.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

constexpr std::uint64_t kMillisecond = 1'000'000;

PagePoint point(std::uint64_t ms, std::uint64_t requested_mib, std::uint64_t reserved_mib,
                PageEvent event = PageEvent::kAllocation) {
  return {.time_ns = ms * kMillisecond,
          .requested_bytes = requested_mib << 20,
          .reserved_bytes = reserved_mib << 20,
          .bytes = 2_MiB,
          .event = event};
}

PageBlock block(std::uint64_t address, std::uint64_t bytes, PageBlockState state = PageBlockState::kLive,
                std::uint64_t stream = kPreloadLegacyStream) {
  return {.address = address, .bytes = bytes, .stream = stream, .state = state};
}

// A process that died of fragmentation, small enough to be counted.
PageProcess small_process() {
  PageProcess process;
  process.name = "python train.py";
  process.process = 4711;
  process.device = 0;
  process.mode = "arena, tensors";
  process.peak_requested_bytes = 6_MiB;
  process.peak_reserved_bytes = 8_MiB;
  process.out_of_memory_count = 1;
  process.capacity_bytes = 8_MiB;
  process.baseline_reserved_bytes = 12_MiB;
  process.figures = {{"Step time", "12 ms"}};
  process.lines = {"Two pieces of 1 MiB are held apart by a live block."};
  process.points = {point(0, 2, 2), point(10, 6, 8), point(20, 4, 8, PageEvent::kFree),
                    point(30, 4, 8, PageEvent::kOutOfMemory), point(40, 2, 8, PageEvent::kFree)};
  constexpr std::uint64_t kBase = 0x7f0010000000;
  PageMoment moment{.name = "at the first out-of-memory",
                    .time_ns = 30 * kMillisecond,
                    .asked_bytes = 2_MiB,
                    .requested_bytes = 4_MiB,
                    .reserved_bytes = 8_MiB};
  moment.blocks = {block(kBase, 2_MiB, PageBlockState::kLive, 0xabc0),
                   block(kBase + 2_MiB, 1_MiB, PageBlockState::kFree),
                   block(kBase + 3_MiB, 2_MiB),
                   block(kBase + 5_MiB, 512_KiB, PageBlockState::kFree),
                   block(kBase + 5_MiB + 512_KiB, 512_KiB, PageBlockState::kFree),
                   block(kBase + 6_MiB, 2_MiB, PageBlockState::kPending, 0xabc0)};
  process.moments = {moment};
  process.holders = {{"stream 0xabc0", 4_MiB, 2}, {"the default stream", 2_MiB, 1}};
  return process;
}

ReportPage page_of(std::vector<PageProcess> processes) {
  return {.title = "forebay run -- python train.py",
          .lines = {"One process."},
          .processes = std::move(processes)};
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// A process with many events and blocks of hostile disorder. Prints its seed where it fails.
PageProcess random_process(unsigned seed, std::size_t events, std::size_t blocks) {
  std::mt19937_64 random(seed);
  PageProcess process = small_process();
  process.points.clear();
  std::uint64_t time = 0, requested = 0, reserved = 0;
  for (std::size_t i = 0; i < events; ++i) {
    time += random() % 1000 == 0 ? 50 * kMillisecond : random() % 1000;
    const std::uint64_t bytes = 512 + random() % 1_MiB;
    const bool is_free = requested > bytes && random() % 2 == 0;
    requested = is_free ? requested - bytes : requested + bytes;
    reserved = std::max(reserved, requested);
    process.points.push_back(
        {time, requested, reserved, bytes, is_free ? PageEvent::kFree : PageEvent::kAllocation});
  }
  PageMoment& moment = process.moments.front();
  moment.blocks.clear();
  std::uint64_t address = 0x7f0000000000;
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::uint64_t bytes = 512 << random() % 14;
    if (random() % 500 == 0) address += 1_GiB;
    moment.blocks.push_back({.address = address,
                             .bytes = bytes,
                             .stream = random() % 12,
                             .order = i,
                             .server = static_cast<PreloadServer>(random() % 50 == 0 ? 3 : 0),
                             .state = static_cast<PageBlockState>(random() % 3)});
    address += bytes;
  }
  std::shuffle(moment.blocks.begin(), moment.blocks.end(), random);
  return process;
}

// --- text ---

TEST(PageText, EscapesWhatHtmlWouldTakeForItself) {
  EXPECT_EQ(html_text("<script>alert('1' & \"2\")</script>"),
            "&lt;script&gt;alert(&#39;1&#39; &amp; &quot;2&quot;)&lt;/script&gt;");
}

TEST(PageText, AStringOfTheScriptEndsNoElement) {
  EXPECT_EQ(script_text("</script> \"\\ \n\x01"), "\"\\u003c/script> \\\"\\\\ \\n\xEF\xBF\xBD\"");
  EXPECT_EQ(script_text("a\tb"), "\"a\\tb\"");
}

TEST(PageText, ReplacesWhatCannotBeSeen) {
  const std::string replacement = "\xEF\xBF\xBD";
  EXPECT_EQ(html_text(std::string("a\0b", 3)), "a" + replacement + "b");
  EXPECT_EQ(html_text("a\x1b[31mb"), "a" + replacement + "[31mb");
  EXPECT_EQ(html_text("a\xE2\x80\xAE"
                      "b"),
            "a" + replacement + "b");                           // Writing from right to left.
  EXPECT_EQ(html_text("\xC3\x28"), replacement + "(");          // A character cut short.
  EXPECT_EQ(html_text("\xC0\xAF"), replacement + replacement);  // Longer than it needs to be.
  EXPECT_EQ(html_text("\xED\xA0\x80"), replacement + replacement + replacement);  // Half of a pair.
  EXPECT_EQ(html_text("\xF0\x9F"), replacement + replacement);                    // Cut off at the end.
  EXPECT_EQ(html_text("Größe ✓\n"), "Größe ✓\n");
}

TEST(PageText, FiguresHaveUnits) {
  const std::pair<std::uint64_t, const char*> times[] = {{0, "0 s"},
                                                         {999, "999 ns"},
                                                         {1000, "1.00 µs"},
                                                         {999'994, "999.99 µs"},
                                                         {999'999, "1.00 ms"},
                                                         {1'000'000, "1.00 ms"},
                                                         {999'999'999, "1.00 s"},
                                                         {1'000'000'000, "1.00 s"},
                                                         {59'990'000'000, "59.99 s"},
                                                         {59'999'999'999, "1 min 0 s"},
                                                         {60'000'000'000, "1 min 0 s"},
                                                         {3'661'900'000'000, "61 min 1 s"}};
  for (const auto& [ns, text] : times) EXPECT_EQ(time_text(ns), text);
  const std::pair<double, const char*> parts[] = {
      {0, "0.0 %"}, {0.0994, "9.9 %"}, {0.0995, "10 %"}, {0.5, "50 %"}, {1, "100 %"}};
  for (const auto& [part, text] : parts) EXPECT_EQ(percent_text(part), text);
}

// --- the page ---

TEST(ReportPageTest, SaysWhatItWasGiven) {
  const std::string html = report_page(page_of({small_process()}));

  for (const char* expected :
       {"<title>forebay run -- python train.py</title>", "One process.",
        "process 4711, device 0, arena, tensors", "Two pieces of 1 MiB are held apart by a live block.",
        "Peak requested</dt><dd>6.00 MiB", "Peak reserved</dt><dd>8.00 MiB",
        "2.00 MiB <small>25 % of the reserved memory", "12.00 MiB <small>4.00 MiB more",
        "Step time</dt><dd>12 ms", "Blocks at the first out-of-memory", "stream 0xabc0, 4.00 MiB",
        "2.00 MiB free in 2 pieces, the largest of 1.00 MiB", "which was free, but in no piece large enough",
        "Holders of memory at the peak"}) {
    EXPECT_NE(html.find(expected), std::string::npos) << expected;
  }
}

// One element a line; without the style and the script, which are files of their own.
std::string elements_of(std::string html) {
  for (const auto& [begin, end] : {std::pair("<style>", "</style>"), std::pair("</main>", "</body>")}) {
    const std::size_t at = html.find(begin);
    if (at != std::string::npos) html.erase(at, html.find(end) - at);
  }
  std::string lines;
  for (const char character : html) {
    if (character == '<' && !lines.empty() && lines.back() == '>') lines += '\n';
    lines += character;
  }
  return lines;
}

TEST(ReportPageTest, EachFigureHasItsPlace) {
  PageProcess other;
  other.peak_requested_bytes = 96_MiB;
  other.peak_reserved_bytes = 96_MiB;
  other.capacity_bytes = 1_GiB;
  other.points = {{1, 96_MiB, 96_MiB, 96_MiB, PageEvent::kOther}};
  other.counts_events = true;
  EXPECT_EQ(elements_of(report_page(page_of({other, small_process()}))), R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>forebay run -- python train.py</title>
</style>
</head>
<body>
<main>
<h1>forebay run -- python train.py</h1>
<p class="lead">One process.</p>
<h2>Processes</h2>
<div class="wide" tabindex="0" role="region" aria-label="Processes">
<table>
<caption>The worst first: processes that ran out of memory, then by reserved minus requested bytes</caption>
<thead>
<tr>
<th scope="col">Process</th>
<th scope="col" class="n">Number</th>
<th scope="col" class="n">Device</th>
<th scope="col">Mode</th>
<th scope="col" class="n">Peak requested</th>
<th scope="col" class="n">Peak reserved</th>
<th scope="col" class="n">Reserved, unused</th>
<th scope="col" class="n">Fragmentation</th>
<th scope="col" class="n">Baseline would reserve</th>
<th scope="col" class="n">Out of memory</th>
</tr>
</thead>
<tbody>
<tr>
<th scope="row">
<a href="#process-1">python train.py</a>
</th>
<td class="n">4711</td>
<td class="n">0</td>
<td>arena, tensors</td>
<td class="n">6.00 MiB</td>
<td class="n">8.00 MiB</td>
<td class="n">2.00 MiB</td>
<td class="n">25 %</td>
<td class="n">12.00 MiB</td>
<td class="n">
<strong>1</strong>
</td>
</tr>
<tr>
<th scope="row">
<a href="#process-2">(no name)</a>
</th>
<td class="n">
</td>
<td class="n">
</td>
<td>
</td>
<td class="n">96.00 MiB</td>
<td class="n">96.00 MiB</td>
<td class="n">0 B</td>
<td class="n">0.0 %</td>
<td class="n">not known</td>
<td class="n">0</td>
</tr>
</tbody>
</table>
</div>
<section id="process-1">
<h2>python train.py</h2>
<p class="note">process 4711, device 0, arena, tensors</p>
<p class="why">Two pieces of 1 MiB are held apart by a live block.</p>
<dl class="figures">
<div>
<dt>Peak requested</dt>
<dd>6.00 MiB</dd>
</div>
<div>
<dt>Peak reserved</dt>
<dd>8.00 MiB</dd>
</div>
<div>
<dt>Reserved, unused</dt>
<dd>2.00 MiB <small>25 % of the reserved memory</small>
</dd>
</div>
<div>
<dt>A caching allocator would reserve</dt>
<dd>12.00 MiB <small>4.00 MiB more</small>
</dd>
</div>
<div>
<dt>There was</dt>
<dd>8.00 MiB</dd>
</div>
<div>
<dt>Out of memory</dt>
<dd>1 time</dd>
</div>
<div>
<dt>Step time</dt>
<dd>12 ms</dd>
</div>
</dl>
<figure class="timeline">
<figcaption>Memory over time</figcaption>
<div class="frame">
<div class="scale" aria-hidden="true">
<span style="top:100.0%">0 B</span>
<span style="top:83.3%">2 MiB</span>
<span style="top:66.7%">4 MiB</span>
<span style="top:50.0%">6 MiB</span>
<span style="top:33.3%">8 MiB</span>
<span style="top:16.7%">10 MiB</span>
<span style="top:0.0%">12 MiB</span>
</div>
<div class="plot" tabindex="0" role="slider" aria-label="Memory over time. Arrow keys move, plus and minus zoom, 0 shows all." aria-valuemin="0" aria-valuemax="4" aria-valuenow="1">
<svg viewBox="0 0 10000 1000" preserveAspectRatio="none" aria-hidden="true">
<path class="line" d="M0 1000H10000"/>
<path class="line" d="M0 833H10000"/>
<path class="line" d="M0 667H10000"/>
<path class="line" d="M0 500H10000"/>
<path class="line" d="M0 333H10000"/>
<path class="line" d="M0 167H10000"/>
<path class="line" d="M0 0H10000"/>
<path class="reserved" d="M0 1000H0V833H2500V333H5000V333H7500V333H10000V333H10000V1000Z"/>
<path class="requested" d="M0 1000H0V833H2500V500H5000V667H7500V667H10000V833H10000V1000Z"/>
<path class="capacity" d="M0 333H10000"/>
<path class="baseline" d="M0 0H10000"/>
<path class="refused" d="M7500 0V1000"/>
<path class="cursor" d=""/>
</svg>
<svg class="frees" viewBox="0 0 10000 100" preserveAspectRatio="none" aria-hidden="true">
<path d="M5000 100v-100h30V100ZM9967 100v-100h30V100Z"/>
</svg>
</div>
</div>
<div class="times" aria-hidden="true">
<span>0 s</span>
<span>10.00 ms</span>
<span>20.00 ms</span>
<span>30.00 ms</span>
<span>40.00 ms</span>
</div>
<p class="readout" aria-live="off">Peak of requested memory, at 10.00 ms: 6.00 MiB requested, 8.00 MiB reserved.</p>
<p class="tools">
<button type="button" data-zoom="in">Zoom in</button> <button type="button" data-zoom="out">Zoom out</button> <button type="button" data-zoom="all">All</button>
</p>
<ul class="legend">
<li>
<i class="requested">
</i>requested</li>
<li>
<i class="reserved">
</i>reserved</li>
<li>
<i class="free">
</i>frees, below the axis</li>
<li>
<i class="refused">
</i>out of memory</li>
<li>
<i class="capacity">
</i>memory limit</li>
<li>
<i class="baseline">
</i>reserved by a caching allocator</li>
</ul>
<script type="application/json">{"counts":false,"peak":1,"time":[0,10000000,20000000,30000000,40000000],"requested":[2097152,6291456,4194304,4194304,2097152],"reserved":[2097152,8388608,8388608,8388608,8388608],"bytes":[2097152,2097152,2097152,2097152,2097152],"events":"aafrf"}</script>
</figure>
<figure class="blocks">
<figcaption>Blocks at the first out-of-memory</figcaption>
<p>At 30.00 ms: 4.00 MiB requested, 8.00 MiB reserved. 2.00 MiB free in 2 pieces, the largest of 1.00 MiB. Asked for: <strong>2.00 MiB</strong>, which was free, but in no piece large enough.</p>
<div class="plot" tabindex="0" role="slider" aria-label="Blocks in the order of addresses. Arrow keys move from block to block and from row to row." aria-valuemin="0" aria-valuemax="5" aria-valuenow="0">
<svg viewBox="0 0 1600 20" style="height:2rem" preserveAspectRatio="none" aria-hidden="true">
<path class="free" d="M400 0h200v17h-200zM1000 0h100v17h-100zM1100 0h100v17h-100z"/>
<path class="s0" d="M0 0h400v17h-400z"/>
<path class="s0 pending" d="M1200 0h400v17h-400z"/>
<path class="s1" d="M600 0h400v17h-400z"/>
<path class="seam" d=""/>
<path class="cursor" d=""/>
</svg>
<b style="left:31.25%;top:42.50%" aria-hidden="true">A</b>
<b style="left:68.75%;top:42.50%" aria-hidden="true">B</b>
</div>
<p class="readout" aria-live="off">A row is 8.00 MiB; addresses grow to the right, then downwards.</p>
<ul class="legend">
<li>
<i class="s0">
</i>stream 0xabc0, 4.00 MiB</li>
<li>
<i class="s1">
</i>the default stream, 2.00 MiB</li>
<li>
<i class="free">
</i>free</li>
<li>
<i class="s0 pending">
</i>paler: freed, waiting for its stream</li>
</ul>
<div class="wide" tabindex="0" role="region" aria-label="Free pieces">
<table>
<caption>The largest free pieces, and the blocks beside them</caption>
<thead>
<tr>
<th scope="col">Piece</th>
<th scope="col" class="n">Free</th>
<th scope="col">Address</th>
<th scope="col">Block before</th>
<th scope="col">Block after</th>
</tr>
</thead>
<tbody>
<tr>
<th scope="row">A</th>
<td class="n">1.00 MiB</td>
<td class="a">0x7f0010200000</td>
<td>2.00 MiB, stream 0xabc0</td>
<td>2.00 MiB, the default stream</td>
</tr>
<tr>
<th scope="row">B</th>
<td class="n">1.00 MiB</td>
<td class="a">0x7f0010500000</td>
<td>2.00 MiB, the default stream</td>
<td>2.00 MiB, stream 0xabc0, waiting for its stream</td>
</tr>
</tbody>
</table>
</div>
<script type="application/json">{"rowWidth":1600,"rowHeight":20,"barHeight":17,"servers":["the arena","only observed","captured into a graph, which owns them","from a memory pool of the program's own","in a context of cuCtxCreate","pitched","managed memory","mapped by the program itself (cuMemCreate), as PyTorch's expandable segments are","where the arena could not serve"],"holders":[],"pieces":[[0,400,"0x7f0010000000",2097152,1,0,"stream 0xabc0",0,0,0],[400,200,"0x7f0010200000",1048576,1,1048576],[600,400,"0x7f0010300000",2097152,1,0,"the default stream",0,0,0],[1000,100,"0x7f0010500000",524288,1,524288],[1100,100,"0x7f0010580000",524288,1,524288],[1200,400,"0x7f0010600000",2097152,1,0,"stream 0xabc0",1,0,0]]}</script>
</figure>
<div class="wide" tabindex="0" role="region" aria-label="Holders">
<table>
<caption>Holders of memory at the peak</caption>
<thead>
<tr>
<th scope="col">Holder</th>
<th scope="col" class="n">Bytes</th>
<th scope="col" class="n">Blocks</th>
<th scope="col" class="n">Of the peak</th>
</tr>
</thead>
<tbody>
<tr>
<th scope="row">stream 0xabc0</th>
<td class="n">4.00 MiB</td>
<td class="n">2</td>
<td class="n">67 %</td>
</tr>
<tr>
<th scope="row">the default stream</th>
<td class="n">2.00 MiB</td>
<td class="n">1</td>
<td class="n">33 %</td>
</tr>
</tbody>
</table>
</div>
</section>
<section id="process-2">
<h2>(no name)</h2>
<p class="note">
</p>
<dl class="figures">
<div>
<dt>Peak requested</dt>
<dd>96.00 MiB</dd>
</div>
<div>
<dt>Peak reserved</dt>
<dd>96.00 MiB</dd>
</div>
<div>
<dt>Reserved, unused</dt>
<dd>0 B <small>0.0 % of the reserved memory</small>
</dd>
</div>
<div>
<dt>There was</dt>
<dd>1.00 GiB</dd>
</div>
<div>
<dt>Out of memory</dt>
<dd>0 times</dd>
</div>
</dl>
<figure class="timeline">
<figcaption>Memory over time</figcaption>
<div class="frame">
<div class="scale" aria-hidden="true">
<span style="top:100.0%">0 B</span>
<span style="top:83.3%">16 MiB</span>
<span style="top:66.7%">32 MiB</span>
<span style="top:50.0%">48 MiB</span>
<span style="top:33.3%">64 MiB</span>
<span style="top:16.7%">80 MiB</span>
<span style="top:0.0%">96 MiB</span>
</div>
<div class="plot" tabindex="0" role="slider" aria-label="Memory over time. Arrow keys move, plus and minus zoom, 0 shows all." aria-valuemin="0" aria-valuemax="0" aria-valuenow="0">
<svg viewBox="0 0 10000 1000" preserveAspectRatio="none" aria-hidden="true">
<path class="line" d="M0 1000H10000"/>
<path class="line" d="M0 833H10000"/>
<path class="line" d="M0 667H10000"/>
<path class="line" d="M0 500H10000"/>
<path class="line" d="M0 333H10000"/>
<path class="line" d="M0 167H10000"/>
<path class="line" d="M0 0H10000"/>
<path class="reserved" d="M10000 1000H10000V0H10000V1000Z"/>
<path class="requested" d="M10000 1000H10000V0H10000V1000Z"/>
<path class="cursor" d=""/>
</svg>
<svg class="frees" viewBox="0 0 10000 100" preserveAspectRatio="none" aria-hidden="true">
<path d=""/>
</svg>
</div>
</div>
<div class="times" aria-hidden="true">
<span>event 0</span>
<span>event 0</span>
<span>event 1</span>
<span>event 1</span>
<span>event 1</span>
</div>
<p class="readout" aria-live="off">Peak of requested memory, at event 1: 96.00 MiB requested, 96.00 MiB reserved.</p>
<p class="tools">
<button type="button" data-zoom="in">Zoom in</button> <button type="button" data-zoom="out">Zoom out</button> <button type="button" data-zoom="all">All</button>
</p>
<ul class="legend">
<li>
<i class="requested">
</i>requested</li>
<li>
<i class="reserved">
</i>reserved</li>
<li>
<i class="free">
</i>frees, below the axis</li>
</ul>
<script type="application/json">{"counts":true,"peak":0,"time":[1],"requested":[100663296],"reserved":[100663296],"bytes":[100663296],"events":"x"}</script>
</figure>
</section>
</body>
</html>
)");
}

TEST(PageBlocks, EachBlockHasItsPlaceAndColour) {
  PageMoment moment{.name = "at the peak", .requested_bytes = 40_MiB, .reserved_bytes = 64_MiB};
  moment.holders = {"", "train.py:7", "model.py:\"8\""};
  constexpr std::uint64_t kBase = 0x10000000;
  // Nine streams, the later the smaller; the last two share a colour.
  std::uint64_t address = kBase;
  for (std::uint64_t i = 0; i < 9; ++i) {
    moment.blocks.push_back(block(address, (10 - i) * 1_MiB, PageBlockState::kLive, 0x100000 + i));
    moment.blocks.back().order = i;
    address += (10 - i) * 1_MiB;
  }
  moment.blocks[1].holder = 1;
  moment.blocks[2].holder = 2;
  moment.blocks[3].holder = 1;
  moment.blocks[4].server = static_cast<PreloadServer>(2);
  moment.blocks[5].state = PageBlockState::kPending;
  address += 2_MiB;  // A gap that is drawn.
  moment.blocks.push_back(block(address, 1_MiB, PageBlockState::kFree));
  address += 1_MiB;
  // Some that are too narrow to be told apart, most of their bytes pending and not of the arena.
  for (int i = 0; i < 4; ++i) {
    moment.blocks.push_back(block(address, 4_KiB, i == 0 ? PageBlockState::kFree : PageBlockState::kPending));
    moment.blocks.back().server = static_cast<PreloadServer>(i == 0 ? 0 : 1);
    address += 4_KiB;
  }
  address += 100_GiB;  // A gap that is cut out.
  moment.blocks.push_back(block(address, 3_MiB));
  EXPECT_EQ(elements_of(blocks_html(moment)), R"(<figure class="blocks">
<figcaption>Blocks at the peak</figcaption>
<p>40.00 MiB requested, 64.00 MiB reserved. 1.00 MiB free in 1 piece, the largest of 1.00 MiB.</p>
<div class="plot" tabindex="0" role="slider" aria-label="Blocks in the order of addresses. Arrow keys move from block to block and from row to row." aria-valuemin="0" aria-valuemax="12" aria-valuenow="0">
<svg viewBox="0 0 1600 40" style="height:3rem" preserveAspectRatio="none" aria-hidden="true">
<path class="free" d="M1200 20h50v17h-50z"/>
<path class="s0" d="M0 0h500v17h-500z"/>
<path class="s1" d="M500 0h450v17h-450z"/>
<path class="s2" d="M950 0h400v17h-400z"/>
<path class="s3" d="M1350 0h250v17h-250zM0 20h100v17h-100z"/>
<path class="s4" d="M100 20h300v17h-300z"/>
<path class="s5 pending" d="M400 20h250v17h-250z"/>
<path class="s6" d="M650 20h200v17h-200z"/>
<path class="s7" d="M850 20h150v17h-150zM1000 20h100v17h-100zM1250 20h150v17h-150z"/>
<path class="s7 pending" d="M1250 20h1v17h-1z"/>
<path class="elsewhere" d="M100 33h300v4h-300zM1250 33h1v4h-1z"/>
<path class="seam" d="M1250 20v17"/>
<path class="cursor" d=""/>
</svg>
<b style="left:76.57%;top:71.25%" aria-hidden="true">A</b>
</div>
<p class="readout" aria-live="off">A row is 32.00 MiB; addresses grow to the right, then downwards. Dark lines divide 2 ranges of addresses; the gaps between them are not shown.</p>
<ul class="legend">
<li>
<i class="s0">
</i>stream 0x100000, 10.00 MiB</li>
<li>
<i class="s1">
</i>stream 0x100001, 9.00 MiB</li>
<li>
<i class="s2">
</i>stream 0x100002, 8.00 MiB</li>
<li>
<i class="s3">
</i>stream 0x100003, 7.00 MiB</li>
<li>
<i class="s4">
</i>stream 0x100004, 6.00 MiB</li>
<li>
<i class="s5">
</i>stream 0x100005, 5.00 MiB</li>
<li>
<i class="s6">
</i>stream 0x100006, 4.00 MiB</li>
<li>
<i class="s7">
</i>3 other streams, 8.01 MiB</li>
<li>
<i class="free">
</i>free</li>
<li>
<i class="gap">
</i>empty: addresses without a block</li>
<li>
<i class="s0 pending">
</i>paler: freed, waiting for its stream</li>
<li>
<i class="elsewhere">
</i>underlined: not served by the arena</li>
</ul>
<div class="wide" tabindex="0" role="region" aria-label="Free pieces">
<table>
<caption>The largest free pieces, and the blocks beside them</caption>
<thead>
<tr>
<th scope="col">Piece</th>
<th scope="col" class="n">Free</th>
<th scope="col">Address</th>
<th scope="col">Block before</th>
<th scope="col">Block after</th>
</tr>
</thead>
<tbody>
<tr>
<th scope="row">A</th>
<td class="n">1.00 MiB</td>
<td class="a">0x13800000</td>
<td>the end of the addresses</td>
<td>4.00 KiB, the default stream, waiting for its stream, only observed</td>
</tr>
</tbody>
</table>
</div>
<script type="application/json">{"rowWidth":1600,"rowHeight":20,"barHeight":17,"servers":["the arena","only observed","captured into a graph, which owns them","from a memory pool of the program's own","in a context of cuCtxCreate","pitched","managed memory","mapped by the program itself (cuMemCreate), as PyTorch's expandable segments are","where the arena could not serve"],"holders":["train.py:7","model.py:\"8\""],"pieces":[[0,500,"0x10000000",10485760,1,0,"stream 0x100000",0,0,0],[500,450,"0x10a00000",9437184,1,0,"stream 0x100001",0,1,0,0],[950,400,"0x11300000",8388608,1,0,"stream 0x100002",0,2,0,1],[1350,350,"0x11b00000",7340032,1,0,"stream 0x100003",0,3,0,0],[1700,300,"0x12200000",6291456,1,0,"stream 0x100004",0,4,2],[2000,250,"0x12800000",5242880,1,0,"stream 0x100005",1,5,0],[2250,200,"0x12d00000",4194304,1,0,"stream 0x100006",0,6,0],[2450,150,"0x13100000",3145728,1,0,"stream 0x100007",0,7,0],[2600,100,"0x13400000",2097152,1,0,"stream 0x100008",0,8,0],[2700,100,"0x13600000",2097152,0,0],[2800,50,"0x13800000",1048576,1,1048576],[2850,1,"0x13900000",16384,4,4096],[2850,150,"0x1913904000",3145728,1,0,"the default stream",0,0,0]]}</script>
</figure>
)");

  moment.blocks = {block(kBase, 1_MiB), block(kBase + 1_MiB, 1_MiB, PageBlockState::kFree)};
  moment.asked_bytes = 1_MiB;
  const auto summary = [&] {
    const std::string html = blocks_html(moment);
    const std::size_t at = html.find("<p>") + 3;
    return html.substr(at, html.find("</p>") - at);
  };
  EXPECT_EQ(summary(),
            "40.00 MiB requested, 64.00 MiB reserved. 1.00 MiB free in 1 piece, the largest of 1.00 MiB. "
            "Asked for: <strong>1.00 MiB</strong>, although a free piece was large enough.");
  ++moment.asked_bytes;
  moment.time_ns = 2500;
  EXPECT_EQ(summary(),
            "At 2.50 µs: 40.00 MiB requested, 64.00 MiB reserved. 1.00 MiB free in 1 piece, the largest of "
            "1.00 MiB. Asked for: <strong>1.00 MiB</strong>, 1 B more than all that was free.");
  moment.blocks.push_back(block(kBase + 3_MiB, 512_KiB, PageBlockState::kFree));
  moment.asked_bytes = 1_MiB + 512_KiB;
  EXPECT_EQ(summary(),
            "At 2.50 µs: 40.00 MiB requested, 64.00 MiB reserved. 1.50 MiB free in 2 pieces, the largest of "
            "1.00 MiB. Asked for: <strong>1.50 MiB</strong>, which was free, but in no piece large enough.");
  moment.blocks = {block(kBase, 64_MiB)};
  moment.asked_bytes = 0;
  EXPECT_EQ(summary(), "At 2.50 µs: 40.00 MiB requested, 64.00 MiB reserved. Nothing was free.");
  moment.blocks = {block(kBase, 63_MiB)};
  EXPECT_EQ(summary(),
            "At 2.50 µs: 40.00 MiB requested, 64.00 MiB reserved. 1.00 MiB lay outside of these blocks.");
}

TEST(ReportPageTest, ClosesWhatItOpens) {
  const std::string html = report_page(page_of({small_process(), random_process(1, 10'000, 500)}));

  for (const char* tag : {"main", "section", "table", "tbody", "tr", "td", "figure", "svg", "div", "ul", "li",
                          "dl", "dd", "p", "script", "style", "h2", "span", "button"}) {
    const std::string opening = "<" + std::string(tag);
    const std::size_t opened = count_of(html, opening + ">") + count_of(html, opening + " ");
    EXPECT_EQ(opened, count_of(html, "</" + std::string(tag) + ">")) << tag;
    EXPECT_GT(opened, 0u) << tag;
  }
}

TEST(ReportPageTest, HoldersAndMomentsBeyondTheLastShownAreCounted) {
  for (const std::size_t more : {0, 2}) {
    PageProcess process = small_process();
    process.moments.assign(4 + more, process.moments.front());
    process.holders.assign(20, {"the same", 1_MiB, 1});
    process.holders.insert(process.holders.end(), more, {"another", 3_MiB, 5});

    const std::string html = report_page(page_of({process}));

    EXPECT_EQ(count_of(html, ">the same<"), 20u);
    EXPECT_EQ(count_of(html, ">another<"), 0u);
    EXPECT_EQ(
        html.find("2 others</th><td class=\"n\">6.00 MiB</td><td class=\"n\">10</td>") != std::string::npos,
        more != 0)
        << html;
    EXPECT_EQ(html.find("2 further moments not shown.") != std::string::npos, more != 0) << html;
    EXPECT_EQ(html.find("further moment") != std::string::npos, more != 0);
    EXPECT_EQ(html.find(" others</th>") != std::string::npos, more != 0);
  }
}

TEST(ReportPageTest, NeedsNothingButItself) {
  const std::string html = report_page(page_of({small_process(), random_process(2, 10'000, 500)}));

  for (const char* reference :
       {"http:", "https:", "src=", "url(", "@import", "<link", "fetch(", "XMLHttp", "//cdn"}) {
    EXPECT_EQ(html.find(reference), std::string::npos) << reference;
  }
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
}

TEST(ReportPageTest, HostileTextStaysText) {
  const std::string hostile = "</script></title><img onerror=alert(1)>\"' onfocus=x &";
  PageProcess process = small_process();
  process.name = process.mode = hostile;
  process.lines = {hostile};
  process.figures = {{hostile, hostile}};
  process.holders = {{hostile, 1, 1}};
  process.moments[0].name = hostile;
  ReportPage page = page_of({process});
  page.title = hostile;
  page.lines = {hostile};

  const std::string html = report_page(page);
  const std::string harmless = report_page(page_of({small_process()}));

  EXPECT_EQ(html.find("<img"), std::string::npos);
  EXPECT_EQ(html.find("\"' onfocus"), std::string::npos);
  EXPECT_EQ(count_of(html, "</script>"), count_of(harmless, "</script>"));
  EXPECT_GE(count_of(html, "&lt;img onerror=alert(1)&gt;&quot;&#39; onfocus=x &amp;"), 9u);
}

// The names of a snapshot reach the page by `forebay explain --report`: a file that somebody sent.
TEST(ReportPageTest, HostileNamesOfATraceStayText) {
  const auto page_with = [](const std::string& name) {
    TraceBuilder builder;
    const std::uint32_t holder = builder.holder(name);
    for (std::uint64_t id = 1; id <= 40; ++id) builder.allocate(id, 1_MiB + id * 4096, id % 3, holder);
    for (std::uint64_t id = 1; id <= 40; id += 2) builder.free(id);
    builder.fail(30_MiB, 0, holder, 1_MiB);
    AllocationTrace trace = builder.finish();
    trace.name = name;
    ModelBackendOptions options;
    options.memory_bytes = 1_GiB;
    const auto backend = std::move(ModelBackend::create(std::move(options))).value();
    Result<PageProcess> process = trace_page(trace, *backend, nullptr);
    EXPECT_TRUE(process.ok()) << process.status().message();
    return report_page(page_of({std::move(process).value()}));
  };
  const std::string hostile = "</script><script>alert(1)</script>\"'><img onerror=alert(1)>\n\x1b\u2028";

  const std::string html = page_with(hostile);
  const std::string harmless = page_with("train.py:12 forward");

  EXPECT_EQ(html.find("<img"), std::string::npos);
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
  EXPECT_EQ(html.find('\x1b'), std::string::npos);
  EXPECT_EQ(count_of(html, "<script"), count_of(harmless, "<script"));
  EXPECT_EQ(count_of(html, "</script"), count_of(harmless, "</script"));
  EXPECT_NE(html.find("\\u003c/script>"), std::string::npos);
}

TEST(ReportPageTest, TheWorstComesFirst) {
  PageProcess thrifty = small_process(), wasteful = small_process(), dead = small_process();
  thrifty.name = "thrifty";
  thrifty.out_of_memory_count = 0;
  thrifty.peak_reserved_bytes = thrifty.peak_requested_bytes;
  wasteful.name = "wasteful";
  wasteful.out_of_memory_count = 0;
  wasteful.peak_reserved_bytes = 100_MiB;
  dead.name = "dead";

  EXPECT_EQ(worst_first({thrifty, wasteful, dead}), (std::vector<std::size_t>{2, 1, 0}));
  const std::string html = report_page(page_of({thrifty, wasteful, dead}));
  EXPECT_LT(html.find("<h2>dead"), html.find("<h2>wasteful"));
  EXPECT_LT(html.find("<h2>wasteful"), html.find("<h2>thrifty"));
}

TEST(ReportPageTest, ManyProcessesAreATable) {
  const std::string html = report_page(page_of(std::vector<PageProcess>(100, small_process())));

  EXPECT_EQ(count_of(html, "<section"), kPageProcesses);
  EXPECT_EQ(count_of(html, "<td class=\"n\">4711</td>"), 100u);
  EXPECT_NE(html.find("84 further processes in the table alone."), std::string::npos);
}

TEST(ReportPageTest, NothingAtAllIsAPageToo) {
  EXPECT_NE(report_page({}).find("No process has recorded anything."), std::string::npos);
  const std::string html =
      report_page({.processes = {PageProcess{.moments = {PageMoment{.name = "at the peak"}}}}});
  EXPECT_NE(html.find("No events were recorded."), std::string::npos);
  EXPECT_NE(html.find("No blocks were recorded at the peak."), std::string::npos);
}

// --- the timeline ---

TEST(PageTimeline, KeepsAllOfAFew) {
  EXPECT_EQ(timeline_sample(small_process().points).size(), 5u);
}

TEST(PageTimeline, KeepsEveryPeakAndRefusalOfMany) {
  PageProcess process = random_process(3, 300'000, 1);
  std::vector<PagePoint>& points = process.points;
  // Spikes of one event each, which a mean would wash away.
  points[100'003].requested_bytes = 900_GiB;
  points[150'011].requested_bytes = 500_GiB;  // Not the highest of all.
  points[200'007].reserved_bytes = 901_GiB;
  points[60'001].reserved_bytes = 700_GiB;
  points[250'001].requested_bytes = 0;
  points[123'457].event = PageEvent::kOutOfMemory;

  const std::vector<std::size_t> kept = timeline_sample(points);

  EXPECT_LE(kept.size(), kTimelinePoints);
  EXPECT_GT(kept.size(), kTimelinePoints / 8);
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
  for (const std::size_t i : {0, 60'001, 100'003, 123'457, 150'011, 200'007, 250'001, 299'999}) {
    EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), i)) << i;
  }
}

TEST(PageTimeline, ABurstKeepsItsShape) {
  // All but two events happen within a thousandth of the time.
  std::vector<PagePoint> points;
  for (std::uint64_t i = 0; i < 100'000; ++i) points.push_back({i * 10, i % 1000, 1000, 1});
  points.push_back({1'000'000'000, 5, 1000, 1});
  EXPECT_GT(timeline_sample(points).size(), 500u);
}

TEST(PageTimeline, CountsEventsWhereTimesAreNotKnown) {
  PageProcess process = small_process();
  for (PagePoint& one : process.points) one.time_ns = 0;
  const std::string html = timeline_html(process);

  EXPECT_NE(html.find("<span>event 4</span>"), std::string::npos);
  EXPECT_NE(html.find("\"time\":[0,1,2,3,4]"), std::string::npos);
}

TEST(PageTimeline, AClockThatGoesBackDoesNotDrawBackwards) {
  PageProcess process = small_process();
  process.points[3].time_ns = 1;
  EXPECT_NE(timeline_html(process).find("\"time\":[0,10000000,20000000,20000000,40000000]"),
            std::string::npos);
}

TEST(PageTimeline, ALimitFarAboveDoesNotFlattenTheRest) {
  PageProcess process = small_process();
  process.baseline_reserved_bytes.reset();
  EXPECT_NE(timeline_html(process).find("class=\"capacity\""), std::string::npos);
  process.capacity_bytes = 80_GiB;
  EXPECT_EQ(timeline_html(process).find("class=\"capacity\""), std::string::npos);
}

TEST(PageTimeline, TheLargestFiguresThereAreDoNotOverflow) {
  PageProcess process = small_process();
  process.points[1].requested_bytes = process.points[1].reserved_bytes = UINT64_MAX;
  process.points[4].time_ns = UINT64_MAX;
  const std::string html = timeline_html(process);
  EXPECT_LT(html.size(), 20'000u);
  EXPECT_EQ(html.find("nan"), std::string::npos);
}

// --- the blocks ---

TEST(PageBlocks, FreeNeighboursAreOnePiece) {
  const std::vector<PageBlock> blocks = blocks_in_order(small_process().moments[0].blocks);
  const std::vector<FreePiece> pieces = free_pieces(blocks);

  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].bytes, 1_MiB);
  EXPECT_EQ(pieces[1].bytes, 1_MiB);
  EXPECT_EQ(pieces[0].before, 0u);
  EXPECT_EQ(pieces[0].after, 2u);
  EXPECT_EQ(pieces[1].before, 2u);
  EXPECT_EQ(pieces[1].after, 5u);
}

TEST(PageBlocks, PiecesEndWhereAddressesDo) {
  const std::vector<PageBlock> blocks = {block(0x1000, 0x1000, PageBlockState::kFree),
                                         block(0x8000, 0x1000, PageBlockState::kFree), block(0x9000, 0x1000)};
  const std::vector<FreePiece> pieces = free_pieces(blocks);

  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].before, kNoBlock);
  EXPECT_EQ(pieces[0].after, kNoBlock);
  EXPECT_EQ(pieces[1].after, 2u);
}

TEST(PageBlocks, OverlapsAndNonsenseAreCut) {
  const std::vector<PageBlock> kept =
      blocks_in_order({block(0x3000, 0), block(0x1000, 0x2000), block(0x2000, 0x2000), block(0x1800, 0x100),
                       block(UINT64_MAX - 1, 100)});

  ASSERT_EQ(kept.size(), 3u);
  EXPECT_EQ(kept[1].address, 0x3000u);
  EXPECT_EQ(kept[1].bytes, 0x1000u);
  EXPECT_EQ(kept[2].bytes, 1u);
}

TEST(PageBlocks, NamesTheLargestFreePiecesAndTheirNeighbours) {
  const std::string html = blocks_html(small_process().moments[0]);

  EXPECT_EQ(count_of(html, "aria-hidden=\"true\">A</b>"), 1u);
  EXPECT_EQ(count_of(html, "aria-hidden=\"true\">B</b>"), 1u);
  EXPECT_NE(
      html.find(
          "<td class=\"a\">0x7f0010200000</td><td>2.00 MiB, stream 0xabc0</td><td>2.00 MiB, the default "
          "stream</td>"),
      std::string::npos)
      << html;
}

TEST(PageBlocks, SmallGapsAreDrawnAndLargeOnesAreCut) {
  PageMoment moment{.name = "at the peak", .reserved_bytes = 8_MiB};
  moment.blocks = {block(0x10000000, 2_MiB), block(0x10000000 + 3_MiB, 2_MiB), block(0x7f0000000000, 2_MiB)};
  const std::string html = blocks_html(moment);

  // Six of blocks and one between them, in units of the row.
  EXPECT_NE(html.find("\"pieces\":[[0,457,\"0x10000000\",2097152,1,0,"), std::string::npos) << html;
  EXPECT_NE(html.find("[457,228,\"0x10200000\",1048576,0,0]"), std::string::npos) << html;
  EXPECT_NE(html.find("Dark lines divide 2 ranges of addresses"), std::string::npos);
  EXPECT_NE(html.find("empty: addresses without a block"), std::string::npos);
  EXPECT_NE(html.find("2.00 MiB lay outside of these blocks."), std::string::npos);
}

TEST(PageBlocks, AHundredThousandBlocksStayAPageOfReasonableSize) {
  for (const unsigned seed : {4u, 5u}) {
    SCOPED_TRACE(seed);
    PageProcess process = random_process(seed, 300'000, 100'000);
    const std::string html = report_page(page_of({process}));
    EXPECT_LT(html.size(), 2u << 20);
  }
}

TEST(PageBlocks, NamesTheHoldersOfBlocks) {
  PageProcess process = small_process();
  process.moments[0].holders = {"", "train.py:12 <lambda>", "nowhere"};
  process.moments[0].blocks[0].holder = 1;
  process.moments[0].blocks[2].holder = 77;  // None of the list.
  const std::string html = report_page(page_of({process}));

  EXPECT_NE(html.find("\"holders\":[\"train.py:12 \\u003clambda>\"]"), std::string::npos) << html;
  EXPECT_NE(html.find("train.py:12 &lt;lambda&gt;</td>"), std::string::npos) << "beside a free piece";
  EXPECT_EQ(html.find("nowhere"), std::string::npos);
}

TEST(PageTimeline, NamesEventsWhereNoTimesAreKnown) {
  PageProcess process = small_process();
  process.counts_events = true;
  for (std::size_t i = 0; i < process.points.size(); ++i) process.points[i].time_ns = 100 * i;
  const std::string html = report_page(page_of({process}));

  EXPECT_NE(html.find("<span>event 400</span>"), std::string::npos) << html;
  EXPECT_NE(html.find("Peak of requested memory, at event 100"), std::string::npos);
}

TEST(PageProcessName, LeavesOutNumbersThatAreNotKnown) {
  PageProcess process = small_process();
  process.process.reset();
  process.device.reset();
  const std::string html = report_page(page_of({process}));

  EXPECT_NE(html.find("<p class=\"note\">arena, tensors</p>"), std::string::npos) << html;
}

// --- a browser ---

std::string browser() {
  for (const char* name : {"chromium", "chromium-browser", "chromium-headless-shell", "chrome-headless-shell",
                           "google-chrome", "google-chrome-stable"}) {
    for (const char* directory : {"/usr/bin/", "/usr/local/bin/", "/snap/bin/"}) {
      const std::string path = std::string(directory) + name;
      if (::access(path.c_str(), X_OK) == 0) return path;
    }
  }
  return "";
}

Finished load(const std::string& html) {
  const TemporaryDirectory directory;
  const std::string path = directory / "report.html";
  std::ofstream(path) << html;
  return run_program({browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                      "--user-data-dir=" + directory / "profile", "--host-resolver-rules=MAP * ~NOTFOUND",
                      "--dump-dom", "file://" + path},
                     {{"HOME", directory.path()}});
}

// The value of an attribute of the document's root.
std::string fact(const std::string& document, const std::string& name) {
  const std::size_t root = document.find("<html");
  const std::size_t at = document.find("data-" + name + "=\"", root);
  if (at == std::string::npos || at > document.find('>', root)) return "none";
  const std::size_t begin = at + name.size() + 7;
  return document.substr(begin, document.find('"', begin) - begin);
}

class ReportPageInABrowser : public ::testing::Test {
 protected:
  void SetUp() override {
    if (browser().empty()) {
      GTEST_SKIP()
          << "no Chromium here (chromium, chromium-headless-shell or google-chrome in /usr/bin): the page's "
             "script was not run";
    }
  }

  // Sets `document` to the browser's document after the page's script and then `more` have run. False if the
  // browser loads no page at all, for example if it is confined to other directories.
  static bool document_of(std::string html, const std::string& more, std::string* document) {
    html.insert(html.rfind("</body>"), more.empty() ? "" : "<script>" + more + "</script>");
    const Finished run = load(html);
    *document = run.output;
    if (run.output.find("data-errors") != std::string::npos) return true;
    const bool loads_any =
        load("<html data-errors=0></html>").output.find("data-errors") != std::string::npos;
    EXPECT_FALSE(loads_any) << run.exit_code << run.output;
    return loads_any;
  }
};

#define LOAD_OR_SKIP(document, html, more)                                                \
  std::string document;                                                                   \
  if (!document_of(html, more, &document)) {                                              \
    GTEST_SKIP() << browser() << " loads no page of a temporary directory: " << document; \
  }

TEST_F(ReportPageInABrowser, DrawsWhatItWasGivenWithoutAnError) {
  const PageProcess process = small_process();
  LOAD_OR_SKIP(document, report_page(page_of({process, process})), "");

  EXPECT_EQ(fact(document, "errors"), "0");
  EXPECT_EQ(fact(document, "points"), "10");
  EXPECT_EQ(fact(document, "blocks"), "12");
  EXPECT_EQ(fact(document, "drawn"), "4") << "two timelines and two maps";
}

TEST_F(ReportPageInABrowser, DrawsManyEventsAndHostileNames) {
  PageProcess process = random_process(6, 300'000, 100'000);
  process.name = "</script><script>document.documentElement.dataset.errors='stolen'</script>";
  const std::size_t points = timeline_sample(process.points).size();
  const std::size_t blocks = blocks_in_order(process.moments[0].blocks).size();

  LOAD_OR_SKIP(document, report_page(page_of({process})), "");

  EXPECT_EQ(fact(document, "errors"), "0");
  EXPECT_EQ(fact(document, "points"), std::to_string(points));
  EXPECT_EQ(fact(document, "blocks"), std::to_string(blocks));
  EXPECT_EQ(fact(document, "drawn"), "2");
}

TEST_F(ReportPageInABrowser, AnswersTheKeyboardAndThePointer) {
  const std::string script = R"(
    const say = (name, text) => document.documentElement.setAttribute("data-" + name, text);
    const read = (kind) => document.querySelector("." + kind + " .readout").textContent;
    const press = (kind, key) => document.querySelector("." + kind + " .plot").dispatchEvent(
        new KeyboardEvent("keydown", {key, bubbles: true}));
    press("timeline", "Home"); say("first", read("timeline"));
    press("timeline", "ArrowRight"); say("second", read("timeline"));
    press("timeline", "+");
    say("zoomed", document.querySelector(".timeline svg").getAttribute("viewBox"));
    press("timeline", "End"); say("last", read("timeline"));
    say("followed", document.querySelector(".timeline svg").getAttribute("viewBox"));
    document.querySelector("button[data-zoom=all]").click();
    say("whole", document.querySelector(".timeline svg").getAttribute("viewBox"));
    press("blocks", "Home"); press("blocks", "ArrowRight"); say("piece", read("blocks"));
    const plot = document.querySelector(".blocks .plot"), box = plot.querySelector("svg").getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 2, clientY: box.bottom - 2}));
    say("pointed", read("blocks"));
    say("spoken", plot.getAttribute("aria-valuetext"));
  )";

  LOAD_OR_SKIP(document, report_page(page_of({small_process()})), script);

  EXPECT_EQ(fact(document, "errors"), "0");
  EXPECT_EQ(
      fact(document, "first"),
      "At 0 s, after an allocation of 2.00 MiB: 2.00 MiB requested, 2.00 MiB reserved, 0 B of it unused.");
  EXPECT_EQ(
      fact(document, "second"),
      "At 10.00 ms, after an allocation of 2.00 MiB: 6.00 MiB requested, 8.00 MiB reserved, 2.00 MiB of it "
      "unused.");
  EXPECT_EQ(fact(document, "zoomed"), "0 0 5000 1000");
  EXPECT_EQ(
      fact(document, "last"),
      "At 40.00 ms, after a free of 2.00 MiB: 2.00 MiB requested, 8.00 MiB reserved, 6.00 MiB of it unused.");
  EXPECT_EQ(fact(document, "followed"), "5000 0 5000 1000");
  EXPECT_EQ(fact(document, "whole"), "0 0 10000 1000");
  EXPECT_EQ(fact(document, "piece"), "1.00 MiB free at 0x7f0010200000.");
  EXPECT_EQ(fact(document, "pointed"),
            "2.00 MiB at 0x7f0010600000, stream 0xabc0, freed and waiting for its stream.");
  EXPECT_EQ(fact(document, "spoken"), fact(document, "pointed"));
}

// The check for errors can fail.
TEST_F(ReportPageInABrowser, CountsAnErrorWhenThereIsOne) {
  LOAD_OR_SKIP(document, report_page(page_of({small_process()})), "nothing.at.all();");
  EXPECT_EQ(fact(document, "errors"), "1");
}

}  // namespace
}  // namespace forebay::testing
