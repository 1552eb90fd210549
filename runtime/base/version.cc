#include "forebay/version.h"

namespace forebay {

const char* version() noexcept {
  return FOREBAY_VERSION;
}

}  // namespace forebay
