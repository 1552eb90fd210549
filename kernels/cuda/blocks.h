// The kernels with cooperating threads, one struct each: one source for the device and for the CPU.
//
// `Shared` is the block's shared memory, which begins with any content. The context gives the thread's place,
// barrier() and shuffle_down(); every thread of a block, or of a warp, has to reach each of these.
#pragma once

#include "kernels/cuda/launches.h"
#include "kernels/cuda/packed.h"
#include "kernels/cuda/runs.h"
#include "kernels/moments.h"

namespace forebay::cuda_kernels {

inline constexpr unsigned kWarpSize = 32;

// Sums of whole chunks of adjacent leaves, so that a chunk is an aligned subtree of the norm's tree. A thread
// has the lanes that lie in one access and walks down the leaf's rows of 16 elements in order; the lanes of a
// leaf are then folded in shared memory as definitions.h does it.
template <DataType type>
struct NormLeaves {
  using Launch = NormLeavesLaunch;
  static constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(Storage<type>));
  static constexpr int kLanes = static_cast<int>(definitions::kNormLanes);
  static constexpr int kThreadsPerLeaf = kLanes / kWidth;
  static constexpr int kChunk = kBlockSize / kThreadsPerLeaf;  // Leaves: 64, or 128 of 16-bit elements.
  static constexpr int kRows = static_cast<int>(kLeafCount) / kLanes;
  static constexpr int kUnroll = 8;  // Rows in flight.
  static_assert(kRows % kUnroll == 0 && kChunk % kWarpSize == 0);

  struct Shared {
    // One lane more than there are, so that neither the threads of a leaf nor those of neighbouring leaves
    // meet in a bank.
    double lanes[kChunk][kLanes + 1];
  };

  template <bool aligned>
  static FOREBAY_KERNEL void sum_rows(const Storage<type>* source, double* lanes) {
    for (int row = 0; row < kRows; row += kUnroll) {
      Granule<type, kWidth> rows[kUnroll];
      FOREBAY_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        const Storage<type>* address = source + (row + u) * kLanes;
        if constexpr (aligned) {
          rows[u].load(address);
        } else {
          FOREBAY_UNROLL
          for (int j = 0; j < kWidth; ++j) rows[u].set_raw(j, address[j]);
        }
      }
      FOREBAY_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        FOREBAY_UNROLL
        for (int j = 0; j < kWidth; ++j) lanes[j] = definitions::norm_step(lanes[j], rows[u].value(j));
      }
    }
  }

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    const std::size_t chunk_count = (launch.leaf_count + kChunk - 1) / kChunk;
    for (std::size_t chunk = c.block(); chunk < chunk_count; chunk += c.grid_size()) {
      const std::size_t left = launch.leaf_count - chunk * kChunk;
      const unsigned present = left < kChunk ? static_cast<unsigned>(left) : kChunk;
      const unsigned leaf = c.thread() / kThreadsPerLeaf;
      if (leaf < present) {
        const unsigned lane = c.thread() % kThreadsPerLeaf * kWidth;
        const auto* source =
            static_cast<const Storage<type>*>(launch.source) + (chunk * kChunk + leaf) * kLeafCount + lane;
        double lanes[kWidth] = {};
        if (launch.aligned) {
          sum_rows<true>(source, lanes);
        } else {
          sum_rows<false>(source, lanes);
        }
        FOREBAY_UNROLL
        for (int j = 0; j < kWidth; ++j) shared.lanes[leaf][lane + j] = lanes[j];
      }
      c.barrier();
      if (c.thread() < present) definitions::norm_fold(shared.lanes[c.thread()], definitions::kNormLanes);
      c.barrier();
      if (c.thread() < kWarpSize) {
        const double sum = add_leaves(c, shared, present);
        if (c.thread() == 0) launch.chunk_sums[chunk] = sum;
      }
      c.barrier();  // The next chunk overwrites the memory that this one has just read.
    }
  }

  // One warp adds the chunk's leaves: each thread an aligned run of them, then the threads in pairs.
  template <typename Context>
  static FOREBAY_KERNEL double add_leaves(const Context& c, Shared& shared, unsigned present) {
    constexpr unsigned kPerThread = kChunk / kWarpSize;
    const unsigned first = c.thread() * kPerThread;
    for (unsigned step = 1; step < kPerThread; step *= 2) {
      for (unsigned i = first; i + step < first + kPerThread; i += 2 * step) {
        if (i + step < present) shared.lanes[i][0] = shared.lanes[i][0] + shared.lanes[i + step][0];
      }
    }
    // A thread without leaves has 0, which changes no sum of squares.
    double sum = first < present ? shared.lanes[first][0] : 0.0;
    for (unsigned step = 1; step < kWarpSize; step *= 2) sum = sum + c.shuffle_down(sum, step);
    return sum;
  }
};

// One block.
struct NormTree {
  using Launch = NormTreeLaunch;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    for (std::size_t step = 1; step < launch.count; step *= 2) {
      for (std::size_t i = c.thread() * 2 * step; i + step < launch.count; i += c.block_size() * 2 * step) {
        launch.values[i] = launch.values[i] + launch.values[i + step];
      }
      c.barrier();
    }
    if (c.thread() == 0) {
      *launch.result = definitions::canonical_double(launch.count == 0 ? 0.0 : launch.values[0]);
    }
  }
};

// One block: the slices of every unit side by side, then the units; the decision is one thread's.
struct StepControl {
  using Launch = StepControlArguments;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared&) {
    const std::size_t units = a.unit_count, ranks = static_cast<std::size_t>(a.rank_count);
    for (std::size_t i = c.thread(); i < units * ranks; i += c.block_size()) {
      a.scratch[i] = a.squares[i / units * a.rank_stride + i % units];
    }
    if (a.used != nullptr) {
      for (std::size_t unit = c.thread(); unit < units; unit += c.block_size()) {
        bool used = false;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          used = used || a.used[rank * a.rank_stride + unit] != 0.0;
        }
        a.unit_used[unit] = used ? 1 : 0;
      }
    }
    c.barrier();
    for (std::size_t step = 1; step < ranks; step *= 2) {
      const std::size_t pairs = (ranks - step + 2 * step - 1) / (2 * step);
      for (std::size_t i = c.thread(); i < pairs * units; i += c.block_size()) {
        double* left = a.scratch + i / units * 2 * step * units + i % units;
        *left = *left + left[step * units];
      }
      c.barrier();
    }
    for (std::size_t step = 1; step < units; step *= 2) {
      for (std::size_t i = c.thread() * 2 * step; i + step < units; i += c.block_size() * 2 * step) {
        a.scratch[i] = a.scratch[i] + a.scratch[i + step];
      }
      c.barrier();
    }
    if (c.thread() == 0) definitions::advance_step(a, units == 0 ? 0.0 : a.scratch[0]);
  }
};

// The update of states that are kept in fewer bytes.
template <MomentFormat format>
struct KeptUpdate {
  using Launch = KeptUpdateLaunch;
  static_assert(kMomentBlockCount == kWarpSize * static_cast<unsigned>(kRun));
  // The greatest magnitudes of each thread's m and v.
  struct Shared {
    std::uint32_t m[kBlockSize];
    std::uint32_t v[kBlockSize];
  };
  // Codes of kBlock8: one access of 8 bytes.
  static FOREBAY_KERNEL Packed<kRun> load_codes(const void* array, const Place& place) {
    const auto* source = static_cast<const std::uint8_t*>(array) + place.begin;
    if (place.wide) return load_packed(source, static_cast<Packed<kRun>*>(nullptr));
    Packed<kRun> codes = {};
    FOREBAY_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (i < place.present) codes.words[i / 4] |= static_cast<std::uint32_t>(source[i]) << (8 * (i % 4));
    }
    return codes;
  }
  static FOREBAY_KERNEL std::uint8_t code(const Packed<kRun>& codes, int i) {
    return static_cast<std::uint8_t>(codes.words[i / 4] >> (8 * (i % 4)));
  }
  static FOREBAY_KERNEL void store_codes(void* array, const Place& place, const Packed<kRun>& codes) {
    auto* target = static_cast<std::uint8_t*>(array) + place.begin;
    if (place.wide) return store_packed(target, codes);
    FOREBAY_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (i < place.present) target[i] = code(codes, i);
    }
  }

  static FOREBAY_KERNEL void load_moments(const Moments& kept, bool has_v, const Place& place, Run& m,
                                          Run& v) {
    FOREBAY_UNROLL
    for (int i = 0; i < kRun; ++i) v[i] = 0.0f;
    if constexpr (format == MomentFormat::kFloat32) {
      load_as<DataType::kFloat32>(kept.m, place, m);
      if (has_v) load_as<DataType::kFloat32>(kept.v, place, v);
    } else if constexpr (format == MomentFormat::kBfloat16) {
      load_as<DataType::kBfloat16>(kept.m, place, m);
      if (has_v) load_as<DataType::kBfloat16>(kept.v, place, v);
    } else {
      const std::size_t block = place.begin / kMomentBlockCount;
      const bool any = place.present > 0;
      const std::uint32_t m_exponent =
          definitions::moment_exponent_read(any ? kept.m_exponents[block] : std::uint8_t{0});
      const Packed<kRun> m_codes = load_codes(kept.m, place);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) m[i] = definitions::m_from_code(code(m_codes, i), m_exponent);
      if (!has_v) return;
      const std::uint32_t v_exponent =
          definitions::moment_exponent_read(any ? kept.v_exponents[block] : std::uint8_t{0});
      const Packed<kRun> v_codes = load_codes(kept.v, place);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) v[i] = definitions::v_from_code(code(v_codes, i), v_exponent);
    }
  }

  // Every thread of the block comes here, those without elements too.
  template <typename Context>
  static FOREBAY_KERNEL void store_moments(const Context& c, Shared& shared, const Moments& kept, bool has_v,
                                           const Place& place, bool dithered, std::uint32_t seed,
                                           const Run& m, const Run& v) {
    if constexpr (format == MomentFormat::kFloat32) {
      store_raw<DataType::kFloat32>(kept.m, place, [&](int i) { return m[i]; });
      if (has_v) store_raw<DataType::kFloat32>(kept.v, place, [&](int i) { return v[i]; });
    } else if constexpr (format == MomentFormat::kBfloat16) {
      const auto random = [&](int i) {
        return definitions::dither_bits(seed, m[i], v[i], definitions::kBfloat16Shift);
      };
      store_raw<DataType::kBfloat16>(
          kept.m, place, [&](int i) { return definitions::moment_to_bfloat16(m[i], dithered, random(i).m); });
      if (!has_v) return;
      store_raw<DataType::kBfloat16>(
          kept.v, place, [&](int i) { return definitions::moment_to_bfloat16(v[i], dithered, random(i).v); });
    } else {
      std::uint32_t m_greatest = 0, v_greatest = 0;
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        const std::uint32_t m_size = i < place.present ? float_bits(m[i]) & 0x7FFFFFFFu : 0u;
        const std::uint32_t v_size = i < place.present ? float_bits(v[i]) & 0x7FFFFFFFu : 0u;
        m_greatest = m_size > m_greatest ? m_size : m_greatest;
        v_greatest = v_size > v_greatest ? v_size : v_greatest;
      }
      shared.m[c.thread()] = m_greatest;
      shared.v[c.thread()] = v_greatest;
      c.barrier();
      const unsigned first = c.thread() / kWarpSize * kWarpSize;
      for (unsigned i = first; i < first + kWarpSize; ++i) {
        m_greatest = shared.m[i] > m_greatest ? shared.m[i] : m_greatest;
        v_greatest = shared.v[i] > v_greatest ? shared.v[i] : v_greatest;
      }
      c.barrier();  // The next blocks overwrite the memory that these have just read.
      if (place.present == 0) return;
      const std::uint32_t m_exponent = definitions::moment_exponent(m_greatest);
      const std::uint32_t v_exponent = definitions::moment_exponent(v_greatest);
      Packed<kRun> m_codes = {}, v_codes = {};
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        const definitions::DitherBits random =
            definitions::dither_bits(seed, m[i], v[i], definitions::kMomentShift);
        const std::uint32_t m_code = m_exponent == definitions::kMomentExponentNan
                                         ? 0u
                                         : definitions::m_to_code(m[i], m_exponent, dithered, random.m);
        const std::uint32_t v_code = v_exponent == definitions::kMomentExponentNan
                                         ? 0u
                                         : definitions::v_to_code(v[i], v_exponent, dithered, random.v);
        m_codes.words[i / 4] |= m_code << (8 * (i % 4));
        v_codes.words[i / 4] |= v_code << (8 * (i % 4));
      }
      store_codes(kept.m, place, m_codes);
      if (has_v) store_codes(kept.v, place, v_codes);
      if (c.thread() != first) return;
      const std::size_t block = place.begin / kMomentBlockCount;
      kept.m_exponents[block] = static_cast<std::uint8_t>(m_exponent);
      if (has_v) kept.v_exponents[block] = static_cast<std::uint8_t>(v_exponent);
    }
  }

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    const StepState* const state = launch.arguments.state;
    if (state != nullptr && !definitions::updates(*state, launch.arguments.used)) return;
    const KeptUpdateArguments& kept = launch.arguments.kept;
    const AdamWArguments& a = kept.update;
    const definitions::AdamWConstants constants = definitions::adamw_constants(
        a, state == nullptr ? a.factor : state->factor, state == nullptr ? a.c1 : state->c1,
        state == nullptr ? a.s2 : state->s2);
    const std::uint64_t step = state == nullptr ? kept.step : state->applied_steps;
    const bool dithered = kept.rounding == MomentRounding::kDithered;
    const bool has_v = has_second_moment(a.optimizer);
    const std::uint32_t seed = definitions::dither_seed(step);
    const std::uint64_t master_seed = definitions::step_seed(kept.half.key, step);
    const Masters masters = {a.master,    kept.half,       kept.average, kept.average_weight,
                             a.parameter, a.parameter_type};
    for (std::size_t start = c.block() * kRunTile; start < a.count; start += c.grid_size() * kRunTile) {
      const Place place = place_in_tile(c, start, a.count, launch.aligned);
      Run g, p, m, v;
      load(a.gradient, a.gradient_type, place, g);
      masters.load(place, p);
      load_moments(kept.moments, has_v, place, m, v);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        const definitions::AdamWElement updated =
            definitions::update_element(a.optimizer, constants, g[i], p[i], m[i], v[i]);
        p[i] = updated.p;
        m[i] = updated.m;
        v[i] = updated.v;
      }
      // In the other order the compiler spills registers on Hopper.
      store_moments(c, shared, kept.moments, has_v, place, dithered, seed, m, v);
      masters.store(place, dithered, master_seed, p);
    }
  }
};

}  // namespace forebay::cuda_kernels
