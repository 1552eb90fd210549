#include "forebay/trainer.h"

#include <unistd.h>

#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "forebay/bootstrap.h"
#include "forebay/cuda_backend.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "forebay/log.h"
#include "forebay/nccl_communicator.h"
#include "forebay/process_communicator.h"
#include "forebay/run_on_threads.h"

namespace forebay {
namespace {

ProcessOptions process_options(const TrainerOptions& options, const LaunchEnvironment& place) {
  ProcessOptions process;
  process.rank = place.rank;
  process.size = place.size;
  process.store = place.store;
  process.interface = place.interface;
  process.deadline = options.deadline;
  return process;
}

}  // namespace

// In the order in which they need each other.
struct Trainer::Impl {
  std::unique_ptr<Backend> control_backend;  // cuda between processes: of the control operations.
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<Engine> engine;
  Stream stream;
  const pid_t process = ::getpid();

  void open_device(const TrainerOptions& options, int rank, int local_rank) {
    if (!options.cuda) {
      backend = value_or_throw(HostBackend::create({.name = "host of rank " + std::to_string(rank)}));
    } else {
      const int count = value_or_throw(CudaBackend::device_count());
      if (count == 0) {
        throw Error(
            StatusCode::kUnavailable,
            "TrainerOptions::cuda is true and the CUDA driver shows no GPU; unset CUDA_VISIBLE_DEVICES, "
            "or compute on the host");
      }
      const int ordinal = options.ordinal >= 0 ? options.ordinal : local_rank % count;
      backend =
          value_or_throw(CudaBackend::create({.ordinal = ordinal, .room_bytes = options.engine.room_bytes}));
    }
    kernels = value_or_throw(Kernels::create(*backend));
  }
  // Over NCCL, with another communicator for its control operations.
  void connect_gpus(const TrainerOptions& options, const LaunchEnvironment& place) {
    control_backend =
        value_or_throw(HostBackend::create({.name = "control of rank " + std::to_string(place.rank)}));
    auto control =
        value_or_throw(create_process_communicator(process_options(options, place), *control_backend));
    try {
      open_device(options, place.rank, place.local_rank);
    } catch (const Error& error) {
      control->abort(error.status().with_context("rank " + std::to_string(place.rank)));
      throw;
    }
    communicator = value_or_throw(create_nccl_communicator(
        std::move(control), static_cast<CudaBackend&>(*backend), *kernels, {.deadline = options.deadline}));
  }
  void make_engine(const TrainerOptions& options) {
    engine = std::make_unique<Engine>(*backend, *kernels, *communicator, options.engine);
    stream = value_or_throw(backend->stream_create());
  }
};

Trainer::Trainer(const TrainerOptions& options) : impl_(std::make_unique<Impl>()) {
  const LaunchEnvironment place = value_or_throw(read_launch_environment());
  Impl& impl = *impl_;
  if (place.size == 1) {
    impl.open_device(options, 0, 0);
    impl.communicator = value_or_throw(LocalGroup::create(1)->communicator(0, *impl.backend, *impl.kernels));
  } else if (options.cuda) {
    impl.connect_gpus(options, place);
  } else {
    impl.open_device(options, place.rank, place.local_rank);
    impl.communicator =
        value_or_throw(create_process_communicator(process_options(options, place), *impl.backend));
  }
  impl.make_engine(options);
}

Trainer::Trainer(LocalGroup& group, int rank, const TrainerOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->open_device(options, rank, rank);
  impl_->communicator = value_or_throw(group.communicator(rank, *impl_->backend, *impl_->kernels));
  impl_->make_engine(options);
}

Trainer::~Trainer() {
  if (::getpid() != impl_->process) {
    static_cast<void>(impl_.release());  // A child made by fork() has none of the threads that it would end.
    return;
  }
  if (impl_->stream.handle == nullptr) return;
  Status status = impl_->backend->stream_synchronize(impl_->stream);
  impl_->engine.reset();  // It may have waits on the stream.
  if (const Status destroyed = impl_->backend->stream_destroy(impl_->stream); status.ok()) status = destroyed;
  if (!status.ok()) log(LogLevel::kWarning, "closing a trainer: %s", status.message().c_str());
}

namespace {

// The exception that is being handled.
Status status_of_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return error.status();
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, error.what());
  } catch (...) {
    return Status(StatusCode::kInternal, "an exception that is no std::exception");
  }
}

}  // namespace

void Trainer::on_threads(int ranks, const TrainerOptions& options,
                         const std::function<void(Trainer&)>& train) {
  LocalOptions local;
  local.deadline = options.deadline;
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(ranks, local);
  std::mutex mutex;
  Status first;
  const Status run = internal::run_on_threads(ranks, [&](int rank) {
    std::unique_ptr<Trainer> trainer;
    try {
      trainer = std::make_unique<Trainer>(*group, rank, options);
      train(*trainer);
    } catch (...) {
      const Status status = status_of_exception();
      {
        const std::lock_guard lock(mutex);
        if (first.ok()) first = status.with_context("rank " + std::to_string(rank));
      }
      if (trainer != nullptr) trainer->communicator().abort(status);
    }
  });
  throw_if_error(run);
  throw_if_error(first);
}

Engine& Trainer::engine() noexcept {
  return *impl_->engine;
}
Backend& Trainer::backend() noexcept {
  return *impl_->backend;
}
Kernels& Trainer::kernels() noexcept {
  return *impl_->kernels;
}
Communicator& Trainer::communicator() noexcept {
  return *impl_->communicator;
}
Stream Trainer::stream() const noexcept {
  return impl_->stream;
}
int Trainer::rank() const noexcept {
  return impl_->communicator->rank();
}
int Trainer::ranks() const noexcept {
  return impl_->communicator->size();
}

void Trainer::begin(int index) {
  if (index == 0) engine().step_begin();
  engine().micro_step_begin(index);
}

Lease Trainer::forward(UnitId unit) {
  return engine().forward(unit, stream());
}
Lease Trainer::backward(UnitId unit) {
  return engine().backward(unit, stream());
}

void Trainer::wait() {
  throw_if_error(backend().stream_synchronize(stream()));
}

StepResult Trainer::step(const Hyperparameters& hyperparameters) {
  wait();
  return engine().step(hyperparameters);
}

void Trainer::throw_failure(const Status& status) {
  throw_if_error(status);
}

}  // namespace forebay
