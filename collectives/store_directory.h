// StoreDirectory: the RendezvousStore that is small files in one directory, which all ranks see. A file
// appears whole or not at all (written under another name, then renamed).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "forebay/status.h"
#include "rendezvous_store.h"

namespace forebay::internal {

class StoreDirectory final : public RendezvousStore {
 public:
  // Makes the directory (and its parent, one level) with mode 0700 when it is missing.
  // Errors: kInvalidArgument when it is not a directory, another user's, or writable by others; kIoError.
  static Result<std::unique_ptr<StoreDirectory>> open(const std::string& path);

  // Whoever made the directory removes it again, if it is empty.
  ~StoreDirectory() override;
  StoreDirectory(const StoreDirectory&) = delete;
  StoreDirectory& operator=(const StoreDirectory&) = delete;

  const std::string& where() const noexcept override { return path_; }

  Status write(const std::string& name, std::string_view content) override;
  std::optional<std::string> read(const std::string& name) const override;
  std::optional<std::string> write_once(const std::string& name, std::string_view content) override;
  void remove(const std::string& name) noexcept override;

 private:
  StoreDirectory(std::string path, bool made, bool made_parent)
      : path_(std::move(path)), made_(made), made_parent_(made_parent) {}

  std::string file(const std::string& name) const { return path_ + "/" + name; }
  Result<std::string> write_temporary(std::string_view content);

  const std::string path_;
  const bool made_;
  const bool made_parent_;
};

}  // namespace forebay::internal
