// Cursor: the trainer's own part of the saved state. It holds the position in the data, and the settings that
// a resumed run must share although the sizes of the parameters do not show them.
#pragma once

#include <cstdint>
#include <string>

namespace forebay::gpt {

struct Cursor {
  std::uint64_t samples = 0;  // Samples read so far, over all ranks.
  std::uint64_t seed = 0;
  std::uint64_t text = 0;  // The hash of the text.
  std::uint64_t heads = 0;
  std::uint64_t part = 0;  // The part of the model that the saving rank had.
  // Llama's; 0: of another model, or not saved.
  double rope_theta = 0;
  double norm_epsilon = 0;

  std::string to_text() const;
  // Errors: throws Error(kCorruption) when to_text() did not make `saved`.
  static Cursor from_text(const std::string& saved);
};

// Checks that a run with the cursor `own` may go on from `saved`. `load_state` is the user's directory,
// `directory` the one that was read. Errors: throws Error(kInvalidArgument) for another seed, text, number of
// heads, base of the rotary embedding or epsilon of the norms; kCorruption for another part.
void check_may_resume(const Cursor& own, const Cursor& saved, const std::string& load_state,
                      const std::string& directory);

}  // namespace forebay::gpt
