#include <cstring>

#include "kernels/host_kernels.h"

namespace forebay::host_kernels {
namespace {

using definitions::Element;

template <DataType type>
using Storage = typename Element<type>::Storage;

void cast(const CastArguments& a, std::size_t begin, std::size_t end) {
  if (a.source_type == a.target_type) {
    const std::size_t bytes = element_bytes(a.source_type);
    if (a.source == a.target) return;
    std::memcpy(static_cast<std::byte*>(a.target) + begin * bytes,
                static_cast<const std::byte*>(a.source) + begin * bytes, (end - begin) * bytes);
    return;
  }
  with_type(a.source_type, [&]<DataType source_type>() {
    with_type(a.target_type, [&]<DataType target_type>() {
      const auto* source = static_cast<const Storage<source_type>*>(a.source);
      auto* target = static_cast<Storage<target_type>*>(a.target);
      for (std::size_t i = begin; i < end; ++i) {
        target[i] = definitions::cast_element<source_type, target_type>(source[i]);
      }
    });
  });
}

void accumulate(const AccumulateArguments& a, std::size_t begin, std::size_t end) {
  with_type(a.type, [&]<DataType type>() {
    for (std::size_t i = begin; i < end; ++i) {
      float sum = Element<type>::load(static_cast<const Storage<type>*>(contribution(a, 0))[i]);
      for (int rank = 1; rank < a.rank_count; ++rank) {
        const auto* source = static_cast<const Storage<type>*>(contribution(a, rank));
        sum = definitions::accumulate_step(sum, Element<type>::load(source[i]));
      }
      a.target[i] = definitions::accumulate_store(a.first ? 0.0f : a.target[i], sum, a.first);
    }
  });
}

void scale(const ScaleArguments& a, std::size_t begin, std::size_t end) {
  with_type(a.round_type, [&]<DataType round_type>() {
    for (std::size_t i = begin; i < end; ++i) {
      const auto rounded = definitions::scale_element<round_type>(a.source[i], a.factor);
      if (a.target_type == round_type) {
        static_cast<Storage<round_type>*>(a.target)[i] = rounded;
      } else {
        static_cast<float*>(a.target)[i] = Element<round_type>::load(rounded);
      }
    }
  });
}

void add(const AddArguments& a, std::size_t begin, std::size_t end) {
  with_type(a.type, [&]<DataType type>() {
    const auto* source = static_cast<const Storage<type>*>(a.source);
    auto* target = static_cast<Storage<type>*>(a.target);
    for (std::size_t i = begin; i < end; ++i)
      target[i] = definitions::add_element<type>(target[i], source[i]);
  });
}

void norm_leaves(const NormArguments& a, std::size_t begin, std::size_t end) {
  with_type(a.type, [&]<DataType type>() {
    for (std::size_t leaf = begin; leaf < end; ++leaf) {
      const auto* source = static_cast<const Storage<type>*>(a.source) + leaf * kLeafCount;
      double lanes[definitions::kNormLanes] = {};
      for (std::size_t i = 0; i < kLeafCount; ++i) {
        double& lane = lanes[i % definitions::kNormLanes];
        lane = definitions::norm_step(lane, Element<type>::load(source[i]));
      }
      a.scratch[leaf] = definitions::norm_fold(lanes, definitions::kNormLanes);
    }
  });
}

void adamw(const AdamWArguments& a, std::size_t begin, std::size_t end) {
  const definitions::AdamWConstants constants = constants_of(a);
  with_type(a.gradient_type, [&]<DataType gradient_type>() {
    with_type(a.parameter_type, [&]<DataType parameter_type>() {
      const auto* gradient = static_cast<const Storage<gradient_type>*>(a.gradient);
      auto* parameter = static_cast<Storage<parameter_type>*>(a.parameter);
      for (std::size_t i = begin; i < end; ++i) {
        const definitions::AdamWElement updated =
            definitions::update_element(a.optimizer, constants, Element<gradient_type>::load(gradient[i]),
                                        a.master[i], a.m[i], a.v != nullptr ? a.v[i] : 0.0f);
        a.master[i] = updated.p;
        a.m[i] = updated.m;
        if (a.v != nullptr) a.v[i] = updated.v;
        if (parameter != nullptr) parameter[i] = Element<parameter_type>::round(updated.p);
      }
    });
  });
}

void average(const AverageArguments& a, std::size_t begin, std::size_t end) {
  with_type(a.source_type, [&]<DataType type>() {
    const auto* source = static_cast<const Storage<type>*>(a.source);
    for (std::size_t i = begin; i < end; ++i)
      a.average[i] = definitions::average_element(a.average[i], Element<type>::load(source[i]), a.weight);
  });
}

}  // namespace

const RangeKernels& scalar_kernels() noexcept {
  static constexpr RangeKernels kKernels = {"scalar", cast,        accumulate, scale,
                                            add,      norm_leaves, adamw,      average};
  return kKernels;
}

}  // namespace forebay::host_kernels
