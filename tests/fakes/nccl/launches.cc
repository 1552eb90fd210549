// A launch, when its stream reaches it: it posts its messages, takes those for it, and waits
// until both are done. All transfers of a group go on at the same time, as in one kernel of NCCL's.
#include <algorithm>
#include <cstring>
#include <set>

#include "tests/fakes/nccl/state.h"

namespace forebay::fake_nccl {
namespace {

class Exchange {
 public:
  explicit Exchange(Launch& launch) : launch_(launch), comm_(*launch.comm), world_(*comm_.world) {}

  // False when the communicator was aborted first.
  bool run() {
    Lock lock(state().mutex);
    if (comm_.aborted) return false;
    if (launch_.hangs && !state().options.hang_sends) return hang(lock);
    post();
    for (;;) {
      while (take_one(lock)) {
      }
      if (pending_.empty() &&
          std::all_of(posts_.begin(), posts_.end(), [](const auto& p) { return p.second->done; }))
        return launch_.hangs ? hang(lock) : true;
      if (comm_.aborted) break;
      state().changed.wait(lock);
    }
    withdraw(lock);
    return false;
  }

 private:
  MailboxKey key(const Transfer& transfer) const {
    return transfer.is_send ? MailboxKey{transfer.channel, comm_.rank, transfer.peer}
                            : MailboxKey{transfer.channel, transfer.peer, comm_.rank};
  }

  bool hang(Lock& lock) const {
    state().changed.wait(lock, [&] { return comm_.aborted; });
    return false;
  }

  void post() {
    for (const Transfer& transfer : launch_.transfers) {
      if (!transfer.is_send) {
        pending_.push_back(&transfer);
        continue;
      }
      auto post = std::make_unique<Post>(Post{.source = transfer.source, .bytes = transfer.bytes});
      world_.mailboxes[key(transfer)].push_back(post.get());
      posts_.emplace_back(key(transfer), std::move(post));
    }
    state().changed.notify_all();
  }

  // Takes one message that is there for the first waiting recv of its pair. One of another size stays where
  // it is, and both sides wait.
  bool take_one(Lock& lock) {
    std::set<MailboxKey> blocked;
    for (auto at = pending_.begin(); at != pending_.end(); ++at) {
      const Transfer& wanted = **at;
      if (!blocked.insert(key(wanted)).second) continue;
      std::deque<Post*>& mailbox = world_.mailboxes[key(wanted)];
      if (mailbox.empty() || mailbox.front()->bytes != wanted.bytes) continue;
      Post& post = *mailbox.front();
      mailbox.pop_front();
      post.taken = true;
      lock.unlock();
      if (wanted.target != post.source && !launch_.hangs)
        std::memmove(wanted.target, post.source, post.bytes);
      lock.lock();
      post.done = true;
      pending_.erase(at);
      state().changed.notify_all();
      return true;
    }
    return false;
  }

  // Nobody may read from here any more when the launch is over.
  void withdraw(Lock& lock) {
    for (const auto& [where, post] : posts_) {
      if (!post->taken) std::erase(world_.mailboxes[where], post.get());
    }
    state().changed.wait(lock, [&] {
      return std::all_of(posts_.begin(), posts_.end(),
                         [](const auto& p) { return !p.second->taken || p.second->done; });
    });
  }

  Launch& launch_;
  Comm& comm_;
  World& world_;
  std::vector<const Transfer*> pending_;
  std::vector<std::pair<MailboxKey, std::unique_ptr<Post>>> posts_;
};

// As a ring adds: from the rank after the owner round to the owner.
void add_round_the_ring(const Sum& sum, int rank) {
  const std::size_t size = sum.terms.size();
  for (std::size_t i = 0; i < sum.count; ++i) {
    float total = 0;
    for (std::size_t step = 1; step <= size; ++step) {
      const std::size_t from = (static_cast<std::size_t>(rank) + step) % size;
      const std::byte* const term = step == size ? sum.own : sum.terms[from].data();
      float value = 0;
      std::memcpy(&value, term + i * sizeof(float), sizeof(float));
      total = step == 1 ? value : total + value;
    }
    std::memcpy(sum.target + i * sizeof(float), &total, sizeof(float));
  }
}

}  // namespace

void run_launch(Launch& launch) {
  if (!Exchange(launch).run()) return;
  for (const auto& sum : launch.sums) add_round_the_ring(*sum, launch.comm->rank);
}

}  // namespace forebay::fake_nccl
