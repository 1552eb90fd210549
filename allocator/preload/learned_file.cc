#include "allocator/preload/learned_file.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "forebay/arena.h"
#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay {

Result<std::string> read_learned_file(const std::string& path) {
  const auto refusal = [&](const std::string& found_and_try) {
    return Status(StatusCode::kIoError, "cannot read the learned placements in ", shown_path(path), ": ",
                  found_and_try);
  };
  // A pipe would wait for its other end, in each process of a run.
  struct stat facts {};
  if (::stat(path.c_str(), &facts) == 0 && !S_ISREG(facts.st_mode))
    return refusal("it is no regular file; name one that `forebay replay --learn` wrote");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"), &std::fclose);
  if (file == nullptr) return refusal(std::string(std::strerror(errno)) + "; check the path");
  std::string text;
  char part[1 << 16];
  errno = 0;
  for (std::size_t count; (count = std::fread(part, 1, sizeof part, file.get())) > 0;) {
    if (text.size() + count > kLearnedFileLimit) {
      return Status(StatusCode::kInvalidArgument, "cannot use ", shown_path(path), ": it has more than the ",
                    format_bytes(kLearnedFileLimit), " that `forebay replay --learn` writes; name its file");
    }
    text.append(part, count);
  }
  if (std::ferror(file.get()) != 0) return refusal(std::string(std::strerror(errno)) + "; name a file");
  Status checked = check_learned_placements(text);
  if (!checked.ok()) return checked.with_context(shown_path(path));
  return text;
}

}  // namespace forebay
