#include "allocator/preload/learned_file.h"

#include "forebay/arena.h"
#include "forebay/regular_file.h"
#include "forebay/text.h"

namespace forebay {

Result<std::string> read_learned_file(const std::string& path) {
  Result<std::string> text = internal::read_regular_file(path, kLearnedFileLimit);
  if (!text.ok()) {
    return Status(text.status().code(), "cannot read the learned placements in ", shown_path(path), ": ",
                  text.status().message(), "; name a file that `forebay replay --learn` wrote");
  }
  Status checked = check_learned_placements(text.value());
  if (!checked.ok()) return checked.with_context(shown_path(path));
  return text;
}

}  // namespace forebay
