// A rank of a training run that sleeps instead of computing, to see how much communication is hidden. Rank 0
// prints, for each share, in milliseconds (medians)
//
//   gather G reduce R forward F step S
//
// one of many collectives over a unit, by themselves, the forward pass of a unit, and a step.
//
// Arguments: STAGE UNITS ELEMENTS SHARE [SHARE ...]
//   SHARE  the duration of a collective as a share of a unit's forward pass; a backward pass takes twice that
//   pass.
// Rank, size and store come from the environment.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/engine.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/process_communicator.h"
#include "forebay/stream_call.h"

namespace forebay {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRepetitions = 3;
// In a row: a link that has been idle takes the first bytes faster than it can carry on.
constexpr int kCollectives = 16;
constexpr int kSteps = 5;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Probe {
 public:
  Probe(const std::vector<std::string>& words, const LaunchEnvironment& environment)
      : stage_(std::stoi(words[0])), unit_count_(std::stoi(words[1])), elements_(std::stoull(words[2])) {
    backend_ = value_or_throw(HostBackend::create({}));
    kernels_ = value_or_throw(Kernels::create(*backend_, {.thread_count = 1}));
    communicator_ = value_or_throw(create_process_communicator({.rank = environment.rank,
                                                                .size = environment.size,
                                                                .store = environment.store,
                                                                .interface = environment.interface,
                                                                .deadline = std::chrono::seconds(60)},
                                                               *backend_));
    stream_ = value_or_throw(backend_->stream_create());
  }
  ~Probe() { static_cast<void>(backend_->stream_destroy(stream_)); }

  void run(const std::vector<double>& shares) {
    EngineOptions options{{.stage = stage_}};
    options.optional_gradients = true;
    Engine engine(*backend_, *kernels_, *communicator_, options);
    for (int u = 0; u < unit_count_; ++u)
      engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), elements_);
    engine.commit();
    for (const double share : shares) {
      const double gather = collective_ms(false);
      const double reduce = collective_ms(true);
      // The ranks compute for as long as rank 0 says.
      std::vector<double> all(static_cast<std::size_t>(communicator_->size()));
      throw_if_error(communicator_->exchange(std::as_bytes(std::span(&gather, 1)),
                                             std::as_writable_bytes(std::span(all))));
      const double forward = all[0] / share;
      std::vector<double> times;
      for (int i = 0; i <= kSteps; ++i) {
        const Clock::time_point begin = Clock::now();
        step(engine, std::chrono::duration<double, std::milli>(forward));
        if (i > 0) times.push_back(milliseconds_since(begin));  // The first has no step before it.
      }
      static_cast<void>(engine.statistics());  // Waits.
      if (communicator_->rank() == 0)
        std::printf("gather %.4f reduce %.4f forward %.4f step %.4f\n", gather, reduce, forward,
                    median(times));
    }
    throw_if_error(communicator_->barrier());
  }

 private:
  double collective_ms(bool reduces) {
    const auto ranks = static_cast<std::size_t>(communicator_->size());
    const std::size_t count = elements_ / ranks;
    std::vector<float> memory(2 * elements_ + count);
    auto* const source = reinterpret_cast<std::byte*>(memory.data());
    auto* const other = reinterpret_cast<std::byte*>(memory.data() + elements_);
    std::vector<double> times;
    for (int i = 0; i < kRepetitions; ++i) {
      throw_if_error(communicator_->barrier());
      const Clock::time_point begin = Clock::now();
      for (int k = 0; k < kCollectives; ++k) {
        if (reduces) {
          throw_if_error(communicator_->reduce_scatter({.source = source,
                                                        .source_stride_bytes = count * sizeof(float),
                                                        .count = count,
                                                        .type = DataType::kFloat32,
                                                        .receive = other,
                                                        .target = memory.data() + 2 * elements_,
                                                        .first = true},
                                                       stream_));
        } else {
          throw_if_error(communicator_->all_gather({.source = source,
                                                    .target = other,
                                                    .target_stride_bytes = count * sizeof(float),
                                                    .bytes = count * sizeof(float)},
                                                   stream_));
        }
      }
      throw_if_error(backend_->stream_synchronize(stream_));
      throw_if_error(communicator_->status());
      times.push_back(milliseconds_since(begin) / kCollectives);
    }
    return median(times);
  }

  void step(Engine& engine, std::chrono::duration<double, std::milli> forward) {
    const auto compute = [&](auto duration) {
      throw_if_error(call_on(*backend_, stream_, [duration] { std::this_thread::sleep_for(duration); }));
    };
    engine.step_begin();
    engine.micro_step_begin(0);
    for (int u = 0; u < unit_count_; ++u) {
      const Lease lease = engine.forward(u, stream_);
      compute(forward);
    }
    for (int u = unit_count_ - 1; u >= 0; --u) {
      const Lease lease = engine.backward(u, stream_);
      compute(2 * forward);
    }
    static_cast<void>(engine.step({.groups = {{}}}));
  }

  const int stage_;
  const int unit_count_;
  const std::uint64_t elements_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<Communicator> communicator_;
  Stream stream_;
};

}  // namespace
}  // namespace forebay

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() < 4) {
    std::fprintf(stderr, "usage: overlap_probe STAGE UNITS ELEMENTS SHARE [SHARE ...]\n");
    return 2;
  }
  try {
    const forebay::LaunchEnvironment environment =
        forebay::value_or_throw(forebay::read_launch_environment());
    std::vector<double> shares;
    for (std::size_t i = 3; i < words.size(); ++i) shares.push_back(std::stod(words[i]));
    forebay::Probe(words, environment).run(shares);
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "overlap_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
