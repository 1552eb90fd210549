#include "collectives/rendezvous/wait_monitor.h"

#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "collectives/rendezvous/byte_text.h"
#include "collectives/rendezvous/introduction.h"

namespace forebay::internal {
namespace {

constexpr std::chrono::milliseconds kPoll{2};
// Reports that a store has not taken yet. Fewer: a slow one looks stopped. More fill what the system keeps
// for it.
constexpr std::uint64_t kUnheardMax = 16;
// More ranks than this are not told of: any of them leads on.
constexpr std::size_t kReportedRanksMax = 64;

}  // namespace

std::string encode(const WaitReport& report) {
  std::string bytes;
  append_number(bytes, report.beat);
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
  if (!take_number(&bytes, &report->beat) || !take_number(&bytes, &count) || count > kReportedWaitsMax)
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

WaitKeeper::WaitKeeper(int rank, std::chrono::milliseconds deadline, std::shared_ptr<RendezvousStore> store,
                       std::string prefix)
    : rank_(rank),
      deadline_(deadline),
      rhythm_(wait_rhythm(deadline)),
      store_(std::move(store)),
      prefix_(std::move(prefix)) {}

Status WaitKeeper::start() {
  // The thread inherits the mask: signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    status =
        Status(StatusCode::kUnavailable, "rank " + std::to_string(rank_) +
                                             " cannot start a thread to watch its waits: " + error.what() +
                                             "; raise ulimit -u or -v");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

WaitKeeper::~WaitKeeper() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  thread_.join();
  if (told_ && store_->server_rank() < 0) store_->remove(name(rank_));
}

WaitKeeper::Waiting::Waiting(WaitKeeper& keeper, const Issued& issued, const std::string& group,
                             std::vector<int> ranks, std::function<void()> wake)
    : keeper_(keeper),
      issued_(issued),
      group_(group),
      wake_(std::move(wake)),
      begin_(Clock::now()),
      ranks_(std::move(ranks)) {
  const std::lock_guard lock(keeper_.mutex_);
  keeper_.waiting_.push_back(this);
}

WaitKeeper::Waiting::~Waiting() {
  const std::lock_guard lock(keeper_.mutex_);
  std::erase(keeper_.waiting_, this);
}

void WaitKeeper::Waiting::expect(std::vector<int> ranks) {
  const std::lock_guard lock(keeper_.mutex_);
  ranks_ = std::move(ranks);
}

void WaitKeeper::Waiting::came(int rank) {
  const std::lock_guard lock(keeper_.mutex_);
  std::erase(ranks_, rank);
}

void WaitKeeper::Waiting::finish(std::vector<int> ranks) {
  const std::lock_guard lock(keeper_.mutex_);
  ranks_ = std::move(ranks);
  came_ = true;
}

Status WaitKeeper::Waiting::verdict() const {
  const std::lock_guard lock(keeper_.mutex_);
  return verdict_;
}

Wait WaitKeeper::wait_of(const Waiting& waiting, Clock::time_point now) {
  return {.what = describe(waiting.issued_) + (waiting.group_.empty() ? "" : " ") + waiting.group_,
          .ranks = waiting.ranks_,
          .came = waiting.came_,
          .age = now - waiting.begin_};
}

void WaitKeeper::run() noexcept {
  for (;;) {
    try {
      const Clock::time_point now = Clock::now();
      {
        std::unique_lock lock(mutex_);
        Clock::time_point next = now + rhythm_.beat;
        // Whose verdict is there only has to wake up.
        for (const Waiting* waiting : waiting_) {
          if (waiting->verdict_.ok() && !waiting->ranks_.empty())
            next = std::min(next, waiting->begin_ + deadline_);
        }
        changed_.wait_until(lock, next, [&] { return ending_; });
        if (ending_) return;
      }
      tell(Clock::now());
      judge_late(Clock::now());
    } catch (const std::exception&) {
      // Out of memory: the next beat tries again.
    }
  }
}

std::vector<Wait> WaitKeeper::own_waits(Clock::time_point now, std::chrono::nanoseconds age_min) {
  const std::lock_guard lock(mutex_);
  std::vector<Wait> waits;
  for (const Waiting* waiting : waiting_) {
    if (!waiting->ranks_.empty() && now - waiting->begin_ >= age_min) waits.push_back(wait_of(*waiting, now));
  }
  return waits;
}

void WaitKeeper::tell(Clock::time_point now) {
  WaitReport report{.waits = own_waits(now, rhythm_.beat)};
  if (report.waits.empty() && !told_) return;
  told_ = !report.waits.empty();
  if (told_ || store_->server_rank() >= 0) {
    post(report);
  } else {
    store_->remove(name(rank_));
  }
}

void WaitKeeper::post(const WaitReport& report) {
  const std::lock_guard lock(post_mutex_);
  WaitReport next = report;
  next.beat = beat_ + 1;
  if (store_->server_rank() >= 0) {
    WaitReport taken;
    const std::optional<std::string> text = store_->posted(name(rank_));
    if (text) static_cast<void>(decode(*text, &taken));
    if (next.beat > taken.beat + kUnheardMax) return;
  }
  beat_ = next.beat;
  store_->post(name(rank_), encode(next));
}

bool WaitKeeper::is_heard() {
  std::uint64_t wanted = 0;
  {
    const std::lock_guard lock(post_mutex_);
    wanted = beat_;
  }
  WaitReport taken;
  const std::optional<std::string> text = store_->posted(name(rank_));
  return text && decode(*text, &taken) && taken.beat >= wanted;
}

Status WaitKeeper::silent_server() {
  Status silent(StatusCode::kTimeout, "the ranks cannot ask each other through " + store_->where() +
                                          ": rank " + std::to_string(store_->server_rank()) +
                                          " did not answer; look at what it does, or raise the deadline");
  store_->abandon(silent);
  return silent;
}

Status WaitKeeper::server_status() {
  const int server = store_->server_rank();
  if (server < 0 || server == rank_) return {};
  // Another report changes nothing for whoever reads it, and shows whether it comes back.
  post({.waits = own_waits(Clock::now(), rhythm_.beat)});
  for (const Clock::time_point limit = Clock::now() + rhythm_.fresh; Clock::now() < limit;
       std::this_thread::sleep_for(kPoll)) {
    FOREBAY_RETURN_IF_ERROR(store_->status());
    if (is_heard()) return {};
  }
  return silent_server();
}

std::vector<Wait> WaitKeeper::hear(int rank, Clock::time_point now) {
  if (rank == rank_) return own_waits(now, std::chrono::nanoseconds(0));
  WaitReport report;
  const std::optional<std::string> text = store_->posted(name(rank));
  if (!text || !decode(*text, &report)) return {};
  const auto [place, is_new] = heard_.try_emplace(rank, Heard{report, now});
  Heard& heard = place->second;
  if (!is_new && heard.report.beat != report.beat) heard = {std::move(report), now};
  if (now - heard.changed > rhythm_.fresh) return {};
  std::vector<Wait> waits = heard.report.waits;
  std::erase_if(waits, [](const Wait& wait) { return wait.ranks.empty(); });
  return waits;
}

Status WaitKeeper::judge_one(const Wait& wait, Clock::time_point now) {
  return judge(rank_, wait, deadline_, [&](int rank) { return hear(rank, now); });
}

void WaitKeeper::judge_late(Clock::time_point now) {
  // Who is told of by an old report is known after two looks; so this looks before it has to judge.
  const std::chrono::nanoseconds look = deadline_ - 2 * rhythm_.fresh;
  for (const Wait& wait : own_waits(now, look)) {
    Status verdict = judge_one(wait, now);
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

}  // namespace forebay::internal
