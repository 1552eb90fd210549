// Stands in for a header of Gloo that Gloo's own headers include and Debian's libgloo-dev leaves out. Only
// the sizes of these classes matter here: the code that uses them is in the library. A Gloo that installs the
// header comes first.
#pragma once

#include <memory>

#define FOREBAY_GLOO_STANDS_IN

namespace gloo {

template <typename T>
class NonOwningPtr final {
  std::shared_ptr<T> pointer_;
};

template <typename T>
class WeakNonOwningPtr final {
  std::weak_ptr<T> pointer_;
};

template <typename T>
class ShareableNonOwningPtr final {
  std::shared_ptr<T> pointer_;
};

}  // namespace gloo
