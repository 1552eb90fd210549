#include "forebay/kernels.h"

#include <cstdarg>
#include <cstdio>
#include <string>

#include "host_module.h"

namespace forebay {
namespace {

__attribute__((format(printf, 1, 2))) Status invalid(const char* format, ...) {
  char message[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return Status(StatusCode::kInvalidArgument, message);
}

bool valid(DataType type) noexcept {
  return type == DataType::kFloat32 || type == DataType::kBfloat16 || type == DataType::kFloat16;
}

Status check_type(const char* kernel, const char* name, DataType type) {
  if (valid(type)) return Status();
  return invalid("%s: %s is data type %d, which does not exist; pass kFloat32, kBfloat16 or kFloat16", kernel,
                 name, static_cast<int>(type));
}

// A pointer that `count` elements are read from or written to.
Status check_pointer(const char* kernel, const char* name, const void* pointer, std::size_t count,
                     std::size_t alignment) {
  if (count == 0) return Status();
  if (pointer == nullptr) {
    return invalid("%s of %zu elements: %s is null; pass device memory, or count 0", kernel, count, name);
  }
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
    return invalid("%s of %zu elements: %s is %p, not aligned to its %zu-byte elements; align it", kernel,
                   count, name, pointer, alignment);
  }
  return Status();
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) noexcept {
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a);
  const auto b_begin = reinterpret_cast<std::uintptr_t>(b);
  return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

Status check(const CastArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("cast", "source_type", a.source_type));
  FOREBAY_RETURN_IF_ERROR(check_type("cast", "target_type", a.target_type));
  const std::size_t source_bytes = element_bytes(a.source_type);
  const std::size_t target_bytes = element_bytes(a.target_type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("cast", "source", a.source, a.count, source_bytes));
  FOREBAY_RETURN_IF_ERROR(check_pointer("cast", "target", a.target, a.count, target_bytes));
  const bool in_place = a.source == a.target && a.source_type == a.target_type;
  if (!in_place && overlap(a.source, a.count * source_bytes, a.target, a.count * target_bytes)) {
    return invalid("cast of %zu elements from %s to %s: source %p and target %p overlap; use separate memory",
                   a.count, data_type_name(a.source_type), data_type_name(a.target_type), a.source, a.target);
  }
  return Status();
}

Status check(const AccumulateArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("accumulate", "type", a.type));
  if (a.rank_count < 1 || a.rank < 0 || a.rank >= a.rank_count) {
    return invalid("accumulate: rank %d of %d ranks does not exist; pass 0 <= rank < rank_count", a.rank,
                   a.rank_count);
  }
  const std::size_t bytes = element_bytes(a.type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("accumulate", "own", a.own, a.count, bytes));
  FOREBAY_RETURN_IF_ERROR(check_pointer("accumulate", "target", a.target, a.count, sizeof(float)));
  if (a.rank_count == 1) return Status();
  FOREBAY_RETURN_IF_ERROR(check_pointer("accumulate", "received", a.received, a.count, bytes));
  if (a.received_stride_bytes < a.count * bytes || a.received_stride_bytes % bytes != 0) {
    return invalid(
        "accumulate of %zu %s elements from %d ranks: received_stride_bytes is %zu; pass a multiple of %zu "
        "that is at "
        "least %zu",
        a.count, data_type_name(a.type), a.rank_count, a.received_stride_bytes, bytes, a.count * bytes);
  }
  return Status();
}

Status check(const ScaleArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("scale", "round_type", a.round_type));
  FOREBAY_RETURN_IF_ERROR(check_type("scale", "target_type", a.target_type));
  if (a.target_type != a.round_type && a.target_type != DataType::kFloat32) {
    return invalid("scale rounded to %s: target_type is %s; pass the rounding type or fp32",
                   data_type_name(a.round_type), data_type_name(a.target_type));
  }
  const std::size_t target_bytes = element_bytes(a.target_type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("scale", "source", a.source, a.count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("scale", "target", a.target, a.count, target_bytes));
  const bool in_place = a.target == a.source && a.target_type == DataType::kFloat32;
  if (!in_place && overlap(a.source, a.count * sizeof(float), a.target, a.count * target_bytes)) {
    return invalid(
        "scale of %zu elements into %s: source %p and target %p overlap; only fp32 may be scaled in place",
        a.count, data_type_name(a.target_type), static_cast<const void*>(a.source), a.target);
  }
  return Status();
}

Status check(const AddArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("add", "type", a.type));
  const std::size_t bytes = element_bytes(a.type);
  FOREBAY_RETURN_IF_ERROR(check_pointer("add", "source", a.source, a.count, bytes));
  FOREBAY_RETURN_IF_ERROR(check_pointer("add", "target", a.target, a.count, bytes));
  if (a.source != a.target && overlap(a.source, a.count * bytes, a.target, a.count * bytes)) {
    return invalid("add of %zu elements: source %p and target %p overlap in part; use separate memory",
                   a.count, a.source, a.target);
  }
  return Status();
}

Status check(const NormArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("norm", "type", a.type));
  if (a.count % kLeafCount != 0) {
    return invalid("norm of %zu elements: the count is no multiple of %zu; pad it with zeros", a.count,
                   kLeafCount);
  }
  FOREBAY_RETURN_IF_ERROR(check_pointer("norm", "source", a.source, a.count, element_bytes(a.type)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("norm", "scratch", a.scratch, a.count / kLeafCount, sizeof(double)));
  return check_pointer("norm", "result", a.result, 1, sizeof(double));
}

Status check(const AdamWArguments& a) {
  FOREBAY_RETURN_IF_ERROR(check_type("adamw", "gradient_type", a.gradient_type));
  FOREBAY_RETURN_IF_ERROR(check_type("adamw", "parameter_type", a.parameter_type));
  FOREBAY_RETURN_IF_ERROR(
      check_pointer("adamw", "gradient", a.gradient, a.count, element_bytes(a.gradient_type)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("adamw", "master", a.master, a.count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("adamw", "m", a.m, a.count, sizeof(float)));
  FOREBAY_RETURN_IF_ERROR(check_pointer("adamw", "v", a.v, a.count, sizeof(float)));
  if (a.parameter == nullptr) return Status();
  return check_pointer("adamw", "parameter", a.parameter, a.count, element_bytes(a.parameter_type));
}

class HostKernels final : public Kernels {
 public:
  HostKernels(Backend& backend, const KernelOptions& options) : backend_(backend), context_(options) {
    const int threads = context_.runner.thread_count();
    description_ = std::string("host ") + context_.kernels.target + ", " + std::to_string(threads) +
                   (threads == 1 ? " thread" : " threads");
  }

  ~HostKernels() override {
    if (module_.handle == nullptr) return;
    // A release path: a backend that refuses keeps the table, which is static memory.
    static_cast<void>(backend_.unload_module(module_).ok());
  }

  // Loads the module. Called once, before anything else.
  Status load() {
    ModuleImage image;
    image.host_kernels = host_kernel_table();
    Result<Module> module = backend_.load_module(image);
    if (!module.ok()) return module.status().with_context("cannot load the host kernels");
    module_ = module.value();
    FOREBAY_RETURN_IF_ERROR(find("forebay_cast", cast_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_accumulate", accumulate_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_scale", scale_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_add", add_));
    FOREBAY_RETURN_IF_ERROR(find("forebay_norm", norm_));
    return find("forebay_adamw", adamw_);
  }

  Status cast(const CastArguments& arguments, Stream stream) override {
    return launch(cast_, arguments, stream);
  }
  Status accumulate(const AccumulateArguments& arguments, Stream stream) override {
    return launch(accumulate_, arguments, stream);
  }
  Status scale(const ScaleArguments& arguments, Stream stream) override {
    return launch(scale_, arguments, stream);
  }
  Status add(const AddArguments& arguments, Stream stream) override {
    return launch(add_, arguments, stream);
  }
  Status norm(const NormArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check(arguments));
    return queue(norm_, arguments, stream);  // Count 0 has a result too.
  }
  Status adamw(const AdamWArguments& arguments, Stream stream) override {
    return launch(adamw_, arguments, stream);
  }

  const char* description() const noexcept override { return description_.c_str(); }

 private:
  Status find(const char* name, Kernel& kernel) {
    Result<Kernel> found = backend_.get_kernel(module_, name);
    if (!found.ok()) return found.status();
    kernel = found.value();
    return Status();
  }

  template <typename Arguments>
  Status launch(Kernel kernel, const Arguments& arguments, Stream stream) {
    FOREBAY_RETURN_IF_ERROR(check(arguments));
    if (arguments.count == 0) return Status();
    return queue(kernel, arguments, stream);
  }

  template <typename Arguments>
  Status queue(Kernel kernel, const Arguments& arguments, Stream stream) {
    const HostLaunch<Arguments> launch = {&context_, arguments};
    const void* const pointers[] = {&launch};
    const std::size_t bytes[] = {sizeof launch};
    return backend_.launch(kernel, Dimensions{}, Dimensions{}, pointers, bytes, 1, stream);
  }

  Backend& backend_;
  HostContext context_;
  std::string description_;
  Module module_;
  Kernel cast_, accumulate_, scale_, add_, norm_, adamw_;
};

}  // namespace

Result<std::unique_ptr<Kernels>> Kernels::create(Backend& backend, const KernelOptions& options) {
  const Capabilities& capabilities = backend.capabilities();
  if (capabilities.kind != BackendKind::kHost) {
    return Status(StatusCode::kUnsupported, std::string("kernels for backend '") + capabilities.name +
                                                "': this build has host kernels only; use the host backend");
  }
  if (options.thread_count < 0) {
    return invalid("kernels on %d threads: the count is negative; pass 0 for all processors, or more",
                   options.thread_count);
  }
  auto kernels = std::make_unique<HostKernels>(backend, options);
  FOREBAY_RETURN_IF_ERROR(kernels->load());
  return std::unique_ptr<Kernels>(std::move(kernels));
}

}  // namespace forebay
