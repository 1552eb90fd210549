// StoreBook: the state of a TCP store's server: the texts, the ranks that are here, and the first failure if
// the run has failed. It has no sockets: the server brings the messages of ranks and sends the answers and
// news.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "collectives/rendezvous/store_messages.h"
#include "forebay/status.h"

namespace forebay::internal {

// The name of the text that says that a rank has ended. All ranks that are here get it before the failure.
std::string lost_name(int rank);

// Threads: one.
class StoreBook {
 public:
  // Bytes of all texts together. Smaller: a run of very many ranks would not fit. Larger: a process that
  // misuses the secret can take more memory.
  static constexpr std::size_t kBytesMax = std::size_t{64} << 20;

  // `own`: the greeting of rank 0, with which all others must agree. `where`: the store, for messages.
  StoreBook(Greeting own, std::string where);

  // Lets a rank in, or returns the reason why not. A rank of this run that contradicts the others fails the
  // run. A rank of another run, or one that comes when all are here, is only sent away. `from`: its address.
  Status greet(const Greeting& greeting, const std::string& from);
  // A secret of a rank that was let in, with which it may come back.
  const std::string& token(int rank) const { return tokens_[static_cast<std::size_t>(rank)]; }
  bool may_return(const Greeting& greeting, const std::string& token) const;
  // The answer to a message of a rank that was let in. kGoodbye is for leave(), kPost for post().
  Message answer(int rank, const Message& message);
  // A posted text becomes news; it is not kept.
  void post(const Message& message);
  // A rank said goodbye.
  void leave(int rank);
  // A rank's connection ended without a goodbye.
  void lose(int rank);
  // A connection from this address was refused for that reason. Ranks whose deadline passes report it.
  void note_refusal(const std::string& from, const std::string& reason);

  bool is_complete() const noexcept { return !roster_.generation.empty(); }
  // The run has failed, or a rank has written a text once, which says why: the store is not needed for long.
  bool is_over() const noexcept { return !cause_.ok() || shared_; }
  // Every rank was let in, or was told why not.
  bool has_answered_all() const noexcept { return answered_count_ == answered_.size(); }

  // The news for every rank that is here, once.
  std::vector<Message> take_news();
  // The news that a rank which was just let in has missed.
  std::vector<Message> news_for_newcomer() const;

 private:
  Status fail(Status cause);
  Status admit(const Introduction& introduction, const std::string& from);
  Message write(const Message& message, bool once);

  const Greeting own_;
  const std::string where_;
  Attendance roster_;
  std::vector<Introduction> introductions_;  // By rank, for ranks that came.
  std::vector<std::string> addresses_;       // By rank.
  std::vector<std::string> tokens_;          // By rank, for ranks that came.
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
