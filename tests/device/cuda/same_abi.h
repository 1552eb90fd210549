// Whether two function types are the same to the machine: as many parameters, each of the same size and kind,
// and pointers to things of the same size and kind where both have a pointee.
#pragma once

#include <type_traits>

namespace forebay::cuda {

template <typename Ours, typename Real>
constexpr bool same_value();

template <typename Ours, typename Real>
constexpr bool same_pointee() {
  // Handles are pointers to different incomplete types, and a void pointer stands for a structure we do not
  // declare.
  if constexpr (std::is_void_v<Ours> || std::is_void_v<Real>) {
    return true;
  } else if constexpr (std::is_function_v<Ours> || std::is_function_v<Real>) {
    return std::is_function_v<Ours> && std::is_function_v<Real>;
  } else if constexpr (
      requires { sizeof(Ours); } && requires { sizeof(Real); }) {
    return same_value<std::remove_cv_t<Ours>, std::remove_cv_t<Real>>();
  } else {
    return !requires {
      sizeof(Ours);
    }
    &&!requires {
      sizeof(Real);
    };
  }
}

template <typename Ours, typename Real>
constexpr bool same_value() {
  if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Real>) {
    if constexpr (!std::is_pointer_v<Ours> || !std::is_pointer_v<Real>) {
      return false;
    } else {
      return same_pointee<std::remove_pointer_t<Ours>, std::remove_pointer_t<Real>>();
    }
  } else if constexpr (std::is_class_v<Ours> || std::is_union_v<Ours>) {
    return (std::is_class_v<Real> || std::is_union_v<Real>)&&sizeof(Ours) == sizeof(Real) &&
           alignof(Ours) == alignof(Real);
  } else {
    return (std::is_integral_v<Real> || std::is_enum_v<Real> ||
            std::is_floating_point_v<Real>)&&std::is_floating_point_v<Ours> ==
               std::is_floating_point_v<Real> &&
           sizeof(Ours) == sizeof(Real);
  }
}

template <typename Ours, typename Real>
constexpr bool same_abi = false;
template <typename OurResult, typename... Ours, typename RealResult, typename... Real>
constexpr bool same_abi<OurResult (*)(Ours...), RealResult (*)(Real...)> = [] {
  if constexpr (sizeof...(Ours) != sizeof...(Real)) {
    return false;
  } else {
    return same_value<OurResult, RealResult>() && (same_value<Ours, Real>() && ...);
  }
}();

}  // namespace forebay::cuda
