// Span<T>: a borrowed run of objects in memory, std::span for C++17. The public headers use it under every
// standard, because a type that depends on the standard would give one function two names.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <type_traits>
#include <utility>

#include "forebay/language.h"
#if __cplusplus >= 202002L
#include <ranges>
#endif

namespace forebay {

// Converts from arrays, from containers that have data() and size(), and from std::span, and in C++20 to
// std::span. Span<const T> also takes a list in braces, for the length of one call:
// `ThreadBinding::create({0, 1})`.
//
// Owns:     nothing. The objects outlive the Span.
// Requires: indices, counts and offsets lie within the Span; they are not checked.
template <typename T>
class Span {
  template <typename Container>
  using FitsFrom = std::enable_if_t<
      !std::is_same_v<std::remove_cv_t<Container>, Span> &&
      std::is_convertible_v<std::remove_pointer_t<decltype(std::data(std::declval<Container&>()))> (*)[],
                            T (*)[]> &&
      std::is_convertible_v<decltype(std::size(std::declval<Container&>())), std::size_t>>;

 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using size_type = std::size_t;
  using pointer = T*;
  using reference = T&;
  using iterator = T*;

  constexpr Span() noexcept = default;
  constexpr Span(T* data, std::size_t count) noexcept : data_(data), size_(count) {}

  // A temporary is taken as const: it fits where its elements are not written, or where it only borrows them.
  template <typename Container, typename = FitsFrom<Container>>
  constexpr Span(Container& container) noexcept : data_(std::data(container)), size_(std::size(container)) {}
  template <typename Container, typename = FitsFrom<const Container>>
  constexpr Span(const Container& container) noexcept
      : data_(std::data(container)), size_(std::size(container)) {}

  template <typename Element = T, typename = std::enable_if_t<std::is_const_v<Element>>>
  constexpr Span(std::initializer_list<value_type> list) noexcept
      : data_(std::data(list)), size_(list.size()) {}

  constexpr T* data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T* begin() const noexcept { return data_; }
  constexpr T* end() const noexcept { return data_ + size_; }
  constexpr T& operator[](std::size_t index) const noexcept { return data_[index]; }
  constexpr T& front() const noexcept { return data_[0]; }
  constexpr T& back() const noexcept { return data_[size_ - 1]; }

  constexpr Span first(std::size_t count) const noexcept { return {data_, count}; }
  constexpr Span last(std::size_t count) const noexcept { return {data_ + (size_ - count), count}; }
  constexpr Span subspan(std::size_t offset) const noexcept { return {data_ + offset, size_ - offset}; }
  constexpr Span subspan(std::size_t offset, std::size_t count) const noexcept {
    return {data_ + offset, count};
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

template <typename T>
Span(T*, std::size_t) -> Span<T>;
template <typename Container>
Span(Container&& container) -> Span<std::remove_pointer_t<decltype(std::data(container))>>;

// The objects as bytes, to send or to store them.
template <typename T>
Span<const std::byte> as_bytes(Span<T> objects) noexcept {
  return {reinterpret_cast<const std::byte*>(objects.data()), objects.size_bytes()};
}
template <typename T>
Span<std::byte> as_writable_bytes(Span<T> objects) noexcept {
  return {reinterpret_cast<std::byte*>(objects.data()), objects.size_bytes()};
}

}  // namespace forebay

#if __cplusplus >= 202002L
// std::span takes it by value too.
template <typename T>
inline constexpr bool std::ranges::enable_borrowed_range<forebay::Span<T>> = true;
template <typename T>
inline constexpr bool std::ranges::enable_view<forebay::Span<T>> = true;
#endif
