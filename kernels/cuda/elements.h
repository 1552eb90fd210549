// The element-wise kernels, one struct each, without barriers: one source for the device and for the CPU.
//
// A struct says how many elements a granule has (kGranule: as many as 16 bytes of its widest array hold, so
// that neighbouring threads touch neighbouring bytes), how many granules of a thread are in flight (kUnroll),
// how to load one (load) and to finish it (finish), and the work on an element outside of granules
// (element). All arithmetic is in definitions.h.
#pragma once

#include "kernels/cuda/launches.h"
#include "kernels/cuda/packed.h"

namespace forebay::cuda_kernels {

// The elements of a granule when the widest array has these elements.
template <DataType a, DataType b = a>
inline constexpr int kGranuleOf = kAccessBytes / static_cast<int>(sizeof(Storage<a>) > sizeof(Storage<b>)
                                                                      ? sizeof(Storage<a>)
                                                                      : sizeof(Storage<b>));

template <DataType source_type, DataType target_type>
struct Cast {
  using Arguments = CastArguments;
  static constexpr int kGranule = kGranuleOf<source_type, target_type>;
  static constexpr int kUnroll = 4;
  using Loaded = Granule<source_type, kGranule>;

  FOREBAY_KERNEL explicit Cast(const CastArguments& a)
      : count(a.count),
        source(static_cast<const Storage<source_type>*>(a.source)),
        target(static_cast<Storage<target_type>*>(a.target)) {}
  FOREBAY_KERNEL bool runs() const { return true; }
  FOREBAY_KERNEL void load(std::size_t i, Loaded& loaded) const { loaded.load(source + i); }
  FOREBAY_KERNEL void finish(std::size_t i, const Loaded& loaded) const {
    Granule<target_type, kGranule> result;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) {
      result.set_raw(j, definitions::cast_element<source_type, target_type>(loaded.raw(j)));
    }
    result.store(target + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const {
    target[i] = definitions::cast_element<source_type, target_type>(source[i]);
  }

  std::size_t count;
  const Storage<source_type>* source;
  Storage<target_type>* target;
};

// Ranks are read four at a time and added one after the other.
template <DataType type>
struct Accumulate {
  using Arguments = AccumulateArguments;
  static constexpr int kGranule = kGranuleOf<DataType::kFloat32>;
  static constexpr int kUnroll = 1;
  static constexpr int kRanks = 4;
  struct Loaded {
    Granule<DataType::kFloat32, kGranule> target;
    Granule<type, kGranule> ranks[kRanks];
  };

  FOREBAY_KERNEL explicit Accumulate(const AccumulateArguments& arguments)
      : count(arguments.count), a(arguments) {}
  FOREBAY_KERNEL bool runs() const { return true; }
  FOREBAY_KERNEL const Storage<type>* contribution(int rank) const {
    return static_cast<const Storage<type>*>(
        rank == a.rank ? a.own : a.received + static_cast<std::size_t>(rank) * a.received_stride_bytes);
  }
  FOREBAY_KERNEL void load_ranks(std::size_t i, int first, Granule<type, kGranule>* ranks) const {
    FOREBAY_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      if (first + r < a.rank_count) ranks[r].load(contribution(first + r) + i);
    }
  }
  FOREBAY_KERNEL void load(std::size_t i, Loaded& loaded) const {
    if (!a.first) loaded.target.load(a.target + i);
    load_ranks(i, 0, loaded.ranks);
  }
  FOREBAY_KERNEL void finish(std::size_t i, Loaded& loaded) const {
    float sums[kGranule];
    for (int first = 0; first < a.rank_count; first += kRanks) {
      if (first > 0) load_ranks(i, first, loaded.ranks);
      FOREBAY_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        if (first + r >= a.rank_count) break;
        FOREBAY_UNROLL
        for (int j = 0; j < kGranule; ++j) {
          const float value = loaded.ranks[r].value(j);
          sums[j] = first + r == 0 ? value : definitions::accumulate_step(sums[j], value);
        }
      }
    }
    Granule<DataType::kFloat32, kGranule> result;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) {
      const float before = a.first ? 0.0f : loaded.target.raw(j);
      result.set_raw(j, definitions::accumulate_store(before, sums[j], a.first));
    }
    result.store(a.target + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const {
    float sum = definitions::Element<type>::load(contribution(0)[i]);
    for (int rank = 1; rank < a.rank_count; ++rank) {
      sum = definitions::accumulate_step(sum, definitions::Element<type>::load(contribution(rank)[i]));
    }
    a.target[i] = definitions::accumulate_store(a.first ? 0.0f : a.target[i], sum, a.first);
  }

  std::size_t count;
  AccumulateArguments a;
};

template <DataType round_type, DataType target_type>
struct Scale {
  using Arguments = ScaleArguments;
  static constexpr int kGranule = kGranuleOf<DataType::kFloat32>;
  static constexpr int kUnroll = 4;
  using Loaded = Granule<DataType::kFloat32, kGranule>;

  FOREBAY_KERNEL explicit Scale(const ScaleArguments& a)
      : count(a.count),
        source(a.source),
        target(static_cast<Storage<target_type>*>(a.target)),
        factor(a.factor) {}
  FOREBAY_KERNEL bool runs() const { return true; }
  FOREBAY_KERNEL Storage<target_type> scaled(float value) const {
    const Storage<round_type> rounded = definitions::scale_element<round_type>(value, factor);
    if constexpr (target_type == round_type) {
      return rounded;
    } else {
      return definitions::Element<round_type>::load(rounded);
    }
  }
  FOREBAY_KERNEL void load(std::size_t i, Loaded& loaded) const { loaded.load(source + i); }
  FOREBAY_KERNEL void finish(std::size_t i, const Loaded& loaded) const {
    Granule<target_type, kGranule> result;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) result.set_raw(j, scaled(loaded.raw(j)));
    result.store(target + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const { target[i] = scaled(source[i]); }

  std::size_t count;
  const float* source;
  Storage<target_type>* target;
  float factor;
};

template <DataType type>
struct Add {
  using Arguments = AddArguments;
  static constexpr int kGranule = kGranuleOf<type>;
  static constexpr int kUnroll = 2;
  struct Loaded {
    Granule<type, kGranule> source, target;
  };

  FOREBAY_KERNEL explicit Add(const AddArguments& a)
      : count(a.count),
        source(static_cast<const Storage<type>*>(a.source)),
        target(static_cast<Storage<type>*>(a.target)) {}
  FOREBAY_KERNEL bool runs() const { return true; }
  FOREBAY_KERNEL void load(std::size_t i, Loaded& loaded) const {
    loaded.source.load(source + i);
    loaded.target.load(target + i);
  }
  FOREBAY_KERNEL void finish(std::size_t i, const Loaded& loaded) const {
    Granule<type, kGranule> result;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) {
      result.set_raw(j, definitions::add_element<type>(loaded.target.raw(j), loaded.source.raw(j)));
    }
    result.store(target + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const {
    target[i] = definitions::add_element<type>(target[i], source[i]);
  }

  std::size_t count;
  const Storage<type>* source;
  Storage<type>* target;
};

template <DataType type>
struct Fill {
  using Arguments = FillArguments;
  static constexpr int kGranule = kGranuleOf<type>;
  static constexpr int kUnroll = 4;
  struct Loaded {};

  FOREBAY_KERNEL explicit Fill(const FillArguments& a)
      : count(a.count),
        target(static_cast<Storage<type>*>(a.target)),
        value(definitions::Element<type>::round(a.value)) {}
  FOREBAY_KERNEL bool runs() const { return true; }
  FOREBAY_KERNEL void load(std::size_t, Loaded&) const {}
  FOREBAY_KERNEL void finish(std::size_t i, const Loaded&) const {
    Granule<type, kGranule> result;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) result.set_raw(j, value);
    result.store(target + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const { target[i] = value; }

  std::size_t count;
  Storage<type>* target;
  Storage<type> value;
};

// Both AdamW calls: without a state the factor and the corrections are the launch's own. `has_parameter`
// false is the fp32 master that is the parameter itself. Four loads of a thread are in flight as it is; a
// second granule would not fit the registers.
template <DataType gradient_type, DataType parameter_type, bool has_parameter>
struct AdamW {
  using Arguments = ControlledAdamWArguments;
  static constexpr int kGranule = kGranuleOf<DataType::kFloat32>;
  static constexpr int kUnroll = 1;
  struct Loaded {
    Granule<gradient_type, kGranule> gradient;
    Granule<DataType::kFloat32, kGranule> p, m, v;
  };

  FOREBAY_KERNEL explicit AdamW(const ControlledAdamWArguments& a)
      : count(a.update.count),
        gradient(static_cast<const Storage<gradient_type>*>(a.update.gradient)),
        master(a.update.master),
        m(a.update.m),
        v(a.update.v),
        parameter(static_cast<Storage<parameter_type>*>(a.update.parameter)),
        applied(a.state == nullptr || definitions::updates(*a.state, a.used)),
        constants(definitions::adamw_constants(
            a.update, a.state == nullptr ? a.update.factor : a.state->factor,
            a.state == nullptr ? a.update.c1 : a.state->c1, a.state == nullptr ? a.update.s2 : a.state->s2)) {
  }
  FOREBAY_KERNEL bool runs() const { return applied; }
  FOREBAY_KERNEL void load(std::size_t i, Loaded& loaded) const {
    loaded.gradient.load(gradient + i);
    loaded.p.load(master + i);
    loaded.m.load(m + i);
    loaded.v.load(v + i);
  }
  FOREBAY_KERNEL void finish(std::size_t i, const Loaded& loaded) const {
    Granule<DataType::kFloat32, kGranule> new_p, new_m, new_v;
    Granule<parameter_type, kGranule> rounded;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) {
      const definitions::AdamWElement updated = definitions::adamw_element(
          constants, loaded.gradient.value(j), loaded.p.raw(j), loaded.m.raw(j), loaded.v.raw(j));
      new_p.set_raw(j, updated.p);
      new_m.set_raw(j, updated.m);
      new_v.set_raw(j, updated.v);
      if constexpr (has_parameter) rounded.set(j, updated.p);
    }
    new_p.store(master + i);
    new_m.store(m + i);
    new_v.store(v + i);
    if constexpr (has_parameter) rounded.store(parameter + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const {
    const definitions::AdamWElement updated = definitions::adamw_element(
        constants, definitions::Element<gradient_type>::load(gradient[i]), master[i], m[i], v[i]);
    master[i] = updated.p;
    m[i] = updated.m;
    v[i] = updated.v;
    if constexpr (has_parameter) parameter[i] = definitions::Element<parameter_type>::round(updated.p);
  }

  std::size_t count;
  const Storage<gradient_type>* gradient;
  float* master;
  float* m;
  float* v;
  Storage<parameter_type>* parameter;
  bool applied;
  definitions::AdamWConstants constants;
};

// The update of any other optimizer. The rule is the same for all threads, and the kernel waits for memory.
template <DataType gradient_type, DataType parameter_type, bool has_parameter>
struct Update {
  using Arguments = ControlledAdamWArguments;
  static constexpr int kGranule = kGranuleOf<DataType::kFloat32>;
  static constexpr int kUnroll = 1;
  struct Loaded {
    Granule<gradient_type, kGranule> gradient;
    Granule<DataType::kFloat32, kGranule> p, m, v;
  };

  FOREBAY_KERNEL explicit Update(const ControlledAdamWArguments& a)
      : adamw(a), optimizer(a.update.optimizer) {
    count = adamw.count;
  }
  FOREBAY_KERNEL bool runs() const { return adamw.applied; }
  FOREBAY_KERNEL bool has_v() const { return has_second_moment(optimizer); }
  FOREBAY_KERNEL void load(std::size_t i, Loaded& loaded) const {
    loaded.gradient.load(adamw.gradient + i);
    loaded.p.load(adamw.master + i);
    loaded.m.load(adamw.m + i);
    if (has_v()) loaded.v.load(adamw.v + i);
  }
  FOREBAY_KERNEL void finish(std::size_t i, const Loaded& loaded) const {
    Granule<DataType::kFloat32, kGranule> new_p, new_m, new_v;
    Granule<parameter_type, kGranule> rounded;
    FOREBAY_UNROLL
    for (int j = 0; j < kGranule; ++j) {
      const definitions::AdamWElement updated =
          definitions::update_element(optimizer, adamw.constants, loaded.gradient.value(j), loaded.p.raw(j),
                                      loaded.m.raw(j), has_v() ? loaded.v.raw(j) : 0.0f);
      new_p.set_raw(j, updated.p);
      new_m.set_raw(j, updated.m);
      new_v.set_raw(j, updated.v);
      if constexpr (has_parameter) rounded.set(j, updated.p);
    }
    new_p.store(adamw.master + i);
    new_m.store(adamw.m + i);
    if (has_v()) new_v.store(adamw.v + i);
    if constexpr (has_parameter) rounded.store(adamw.parameter + i);
  }
  FOREBAY_KERNEL void element(std::size_t i) const {
    const definitions::AdamWElement updated = definitions::update_element(
        optimizer, adamw.constants, definitions::Element<gradient_type>::load(adamw.gradient[i]),
        adamw.master[i], adamw.m[i], has_v() ? adamw.v[i] : 0.0f);
    adamw.master[i] = updated.p;
    adamw.m[i] = updated.m;
    if (has_v()) adamw.v[i] = updated.v;
    if constexpr (has_parameter) adamw.parameter[i] = definitions::Element<parameter_type>::round(updated.p);
  }

  AdamW<gradient_type, parameter_type, has_parameter> adamw;
  Optimizer optimizer;
  std::size_t count = 0;
};

// The work of one thread of an element-wise kernel. Neighbouring threads take neighbouring granules; a
// thread's granules lie a block apart, and blocks stride over the grid.
template <typename Kernel, typename Context>
FOREBAY_KERNEL void run_elements(const Context& c, const ElementLaunch<typename Kernel::Arguments>& launch) {
  const Kernel kernel(launch.arguments);
  if (!kernel.runs()) return;
  const std::size_t granule_count = (kernel.count - launch.head) / Kernel::kGranule;
  const std::size_t tile = static_cast<std::size_t>(c.block_size()) * Kernel::kUnroll;
  for (std::size_t start = c.block() * tile; start < granule_count; start += c.grid_size() * tile) {
    typename Kernel::Loaded loaded[Kernel::kUnroll];
    FOREBAY_UNROLL
    for (int u = 0; u < Kernel::kUnroll; ++u) {
      const std::size_t granule = start + c.thread() + static_cast<std::size_t>(u) * c.block_size();
      if (granule < granule_count) kernel.load(launch.head + granule * Kernel::kGranule, loaded[u]);
    }
    FOREBAY_UNROLL
    for (int u = 0; u < Kernel::kUnroll; ++u) {
      const std::size_t granule = start + c.thread() + static_cast<std::size_t>(u) * c.block_size();
      if (granule < granule_count) kernel.finish(launch.head + granule * Kernel::kGranule, loaded[u]);
    }
  }
  const std::size_t tail = launch.head + granule_count * Kernel::kGranule;
  const std::size_t single_count = kernel.count - granule_count * Kernel::kGranule;
  const std::size_t thread_count = static_cast<std::size_t>(c.grid_size()) * c.block_size();
  for (std::size_t i = static_cast<std::size_t>(c.block()) * c.block_size() + c.thread(); i < single_count;
       i += thread_count) {
    kernel.element(i < launch.head ? i : tail + (i - launch.head));
  }
}

}  // namespace forebay::cuda_kernels
