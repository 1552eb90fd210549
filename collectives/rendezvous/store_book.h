// What the server of a TCP store knows: the texts, who is here, and the first failure if the run has failed.
// No sockets: whoever owns it brings what ranks say and carries away what they shall hear.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "collectives/rendezvous/store_messages.h"
#include "forebay/status.h"

namespace forebay::internal {

// The text that says that a rank has ended; all ranks that are here get it before the cause.
std::string lost_name(int rank);

// Threads: one.
class StoreBook {
 public:
  // All texts together. Smaller: a run of very many ranks would not fit. Larger: more memory for whoever
  // misuses the secret.
  static constexpr std::size_t kBytesMax = std::size_t{64} << 20;

  // `own`: what rank 0 says of itself, which all others must agree with. `where`: the store, for messages.
  StoreBook(Greeting own, std::string where);

  // Lets a rank in, or says why not. A rank of this run that contradicts the others fails the run; one of
  // another run, or one that comes when all are here, is only sent away. `from`: its address.
  Status greet(const Greeting& greeting, const std::string& from);
  // What only a rank that was let in knows, so that it may come back.
  const std::string& token(int rank) const { return tokens_[static_cast<std::size_t>(rank)]; }
  bool may_return(const Greeting& greeting, const std::string& token) const;
  // The answer to what a rank that was let in says; kGoodbye is for leave(), kPost for post().
  Message answer(int rank, const Message& message);
  // What a rank posts becomes news; nothing is kept.
  void post(const Message& message);
  // A rank said goodbye.
  void leave(int rank);
  // A rank's connection ended without.
  void lose(int rank);
  // A connection from this address was not let in, for that reason. For what ranks say when their deadline
  // passes.
  void note_refusal(const std::string& from, const std::string& reason);

  bool is_complete() const noexcept { return !roster_.generation.empty(); }
  // The run has failed, or a rank has told all others something once and for all: nobody needs the store for
  // long.
  bool is_over() const noexcept { return !cause_.ok() || shared_; }
  // Every rank was let in or heard why not.
  bool has_answered_all() const noexcept { return answered_count_ == answered_.size(); }

  // What every rank that is here shall hear, once.
  std::vector<Message> take_news();
  // What a rank that has just been let in has missed.
  std::vector<Message> news_for_newcomer() const;

 private:
  Status fail(Status cause);
  Status admit(const Introduction& introduction, const std::string& from);
  Message write(const Message& message, bool once);

  const Greeting own_;
  const std::string where_;
  Attendance roster_;
  std::vector<Introduction> introductions_;  // By rank; those that came.
  std::vector<std::string> addresses_;       // By rank.
  std::vector<std::string> tokens_;          // By rank; of those that came.
  std::size_t came_count_ = 0;
  std::vector<char> answered_;  // By rank.
  std::size_t answered_count_ = 0;
  struct Text {
    std::string content;
    bool shared;
  };
  std::map<std::string, Text> texts_;
  std::size_t text_bytes_ = 0;
  bool shared_ = false;
  std::size_t refusal_count_ = 0;
  Status cause_;
  std::vector<Message> news_;
};

}  // namespace forebay::internal
