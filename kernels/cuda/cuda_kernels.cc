#include "kernels/cuda/cuda_kernels.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "forebay/kernel_launch.h"
#include "kernels/argument_checks.h"
#include "kernels/cuda/image.h"
#include "kernels/cuda/launches.h"
#include "kernels/definitions.h"

namespace forebay {
namespace {

using cuda_kernels::ElementLaunch;
using cuda_kernels::kBlockSize;
using cuda_kernels::ProductKind;

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};
constexpr int kTypeCount = 3;

constexpr int index_of(DataType type) noexcept {
  return static_cast<int>(type);
}

// Blocks in a grid for each multiprocessor. Several times as many as one holds at once, so that none is left
// waiting for the slowest; more would only repeat the begin of a block.
constexpr std::size_t kBlocksPerProcessor = 32;

// The most that one load or store moves.
constexpr std::size_t kAccessBytes = 16;

struct Operand {
  const void* address;
  std::size_t element_bytes;
};

// The elements before the first granule at which every operand is aligned; `count` when there is no such
// place, so that all are done one by one.
std::size_t head_of(std::size_t count, std::size_t granule, std::initializer_list<Operand> operands) {
  for (std::size_t head = 0; head < granule; ++head) {
    const bool aligned = std::all_of(operands.begin(), operands.end(), [=](const Operand& operand) {
      const auto address = reinterpret_cast<std::uintptr_t>(operand.address);
      return (address + head * operand.element_bytes) % (granule * operand.element_bytes) == 0;
    });
    if (aligned) return std::min(head, count);
  }
  return count;
}

class CudaKernels final : public Kernels {
 public:
  explicit CudaKernels(Backend& backend) : backend_(backend) {
    const Capabilities& capabilities = backend.capabilities();
    processor_count_ = static_cast<std::size_t>(std::max(capabilities.multiprocessor_count, 1));
    description_ = std::string(capabilities.name) + ", " + std::to_string(processor_count_) +
                   (processor_count_ == 1 ? " multiprocessor" : " multiprocessors");
  }

  ~CudaKernels() override {
    if (module_.handle == nullptr) return;
    // A release path: a backend that refuses keeps the module, and its end takes it along.
    static_cast<void>(backend_.unload_module(module_).ok());
  }

  // Loads the module. Called once, before anything else.
  Status load() {
    const cuda_kernels::KernelImage compiled = cuda_kernels::kernel_image();
    ModuleImage image;
    image.image = compiled.data;
    image.image_bytes = compiled.bytes;
    Result<Module> module = backend_.load_module(image);
    if (!module.ok()) {
      if (compiled.targets == nullptr) {
        return Status(StatusCode::kUnsupported,
                      std::string("kernels for ") + backend_.capabilities().name +
                          ": this build has no compiled CUDA kernels: nvcc was not found when it was built; "
                          "install the CUDA toolkit and rebuild");
      }
      return module.status().with_context(std::string("cannot load the CUDA kernels, compiled for ") +
                                          compiled.targets);
    }
    module_ = module.value();
    return find_all();
  }

  Status cast(const CastArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (a.count == 0) return Status();
    const std::size_t source_bytes = element_bytes(a.source_type),
                      target_bytes = element_bytes(a.target_type);
    if (a.source_type == a.target_type) {
      if (a.source == a.target) return Status();
      return backend_.copy_async(a.target, a.source, a.count * source_bytes, stream);
    }
    const std::size_t granule = kAccessBytes / std::max(source_bytes, target_bytes);
    return elements(cast_[index_of(a.source_type)][index_of(a.target_type)], a, a.count, granule,
                    {{a.source, source_bytes}, {a.target, target_bytes}}, stream);
  }

  Status accumulate(const AccumulateArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (a.count == 0) return Status();
    const std::size_t bytes = element_bytes(a.type);
    // Received contributions are a stride apart: where two neighbours are aligned, all are.
    const bool received = a.rank_count > 1;
    const std::byte* first = received ? a.received : static_cast<const std::byte*>(a.own);
    const std::byte* second = received ? a.received + a.received_stride_bytes : first;
    return elements(accumulate_[index_of(a.type)], a, a.count, kAccessBytes / sizeof(float),
                    {{a.target, sizeof(float)}, {a.own, bytes}, {first, bytes}, {second, bytes}}, stream);
  }

  Status scale(const ScaleArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (a.count == 0) return Status();
    return elements(scale_[index_of(a.round_type)][index_of(a.target_type)], a, a.count,
                    kAccessBytes / sizeof(float),
                    {{a.source, sizeof(float)}, {a.target, element_bytes(a.target_type)}}, stream);
  }

  Status add(const AddArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (a.count == 0) return Status();
    const std::size_t bytes = element_bytes(a.type);
    return elements(add_[index_of(a.type)], a, a.count, kAccessBytes / bytes,
                    {{a.source, bytes}, {a.target, bytes}}, stream);
  }

  Status fill(const FillArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (a.count == 0) return Status();
    const std::size_t bytes = element_bytes(a.type);
    return elements(fill_[index_of(a.type)], a, a.count, kAccessBytes / bytes, {{a.target, bytes}}, stream);
  }

  Status norm(const NormArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const std::size_t leaf_count = a.count / kLeafCount;
    // Threads that share a leaf: as many as accesses hold its 16 lanes.
    const std::size_t chunk = kBlockSize / element_bytes(a.type);
    const std::size_t chunk_count = (leaf_count + chunk - 1) / chunk;
    if (chunk_count > 0) {
      const cuda_kernels::NormLeavesLaunch leaves = {
          a.source, a.scratch, leaf_count, reinterpret_cast<std::uintptr_t>(a.source) % kAccessBytes == 0};
      FOREBAY_RETURN_IF_ERROR(launch(norm_leaves_[index_of(a.type)], leaves, chunk_count, stream));
    }
    const cuda_kernels::NormTreeLaunch tree = {a.scratch, chunk_count, a.result};
    return launch(norm_tree_, tree, 1, stream);
  }

  Status adamw(const AdamWArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return adamw_elements({a, nullptr, nullptr}, stream);
  }

  Status step_control(const StepControlArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return launch(step_control_, a, 1, stream);
  }

  Status adamw_controlled(const ControlledAdamWArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return adamw_elements(a, stream);
  }

  Status update_kept(const ControlledKeptUpdateArguments& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const AdamWArguments& u = a.kept.update;
    if (u.count == 0) return Status();
    const Moments& moments = a.kept.moments;
    const void* const master = a.kept.half.elements != nullptr
                                   ? static_cast<const void*>(a.kept.half.elements)
                                   : static_cast<const void*>(u.master);
    const bool aligned = head_of(u.count, kAccessBytes,
                                 {{u.gradient, 1},
                                  {master, 1},
                                  {moments.m, 1},
                                  {moments.v, 1},
                                  {a.kept.average, 1},
                                  {u.parameter, 1}}) == 0;
    return launch(kept_update_[static_cast<std::size_t>(moments.format)],
                  cuda_kernels::KeptUpdateLaunch{a, aligned}, run_tiles(u.count), stream);
  }

  Status muon_momentum(const Controlled<MuonMomentumArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const MuonMomentumArguments& part = a.part;
    if (part.count == 0) return Status();
    const bool aligned =
        head_of(part.count, kAccessBytes, {{part.gradient.values, 1}, {part.m, 1}, {part.values, 1}}) == 0;
    return launch(muon_momentum_, cuda_kernels::RunLaunch<MuonMomentumArguments>{a, aligned},
                  run_tiles(part.count), stream);
  }

  // An odd number of steps ends in the scratch, where a tall matrix is turned over before and after.
  Status orthogonalise(const Controlled<OrthogonaliseArguments>& a, Stream stream) override {
    static_assert(kMuonSteps % 2 == 1);
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const std::size_t rows = a.part.rows, columns = a.part.columns, count = rows * columns;
    if (count == 0) return Status();
    const bool is_tall = rows > columns;
    const std::size_t k = std::min(rows, columns), n = std::max(rows, columns);
    float *x = a.part.matrix, *moved = a.part.scratch;
    float* const square = a.part.scratch + orthogonal_scratch_count(rows, columns) - k * k;
    float* const gram = square - k * k;
    // The divisor is used before the first product.
    const cuda_kernels::MatrixNormLaunch norm = {
        x, reinterpret_cast<double*>(a.part.scratch), gram, rows, columns, a.state};
    constexpr std::size_t kRows = kBlockSize / definitions::kNormLanes;
    FOREBAY_RETURN_IF_ERROR(launch(matrix_squares_, norm, (rows + kRows - 1) / kRows, stream));
    FOREBAY_RETURN_IF_ERROR(launch(matrix_norm_, norm, 1, stream));
    FOREBAY_RETURN_IF_ERROR(
        move_matrix({x, is_tall ? moved : x, gram, rows, columns, is_tall, a.state}, stream));
    if (is_tall) FOREBAY_RETURN_IF_ERROR(backend_.copy_async(x, moved, count * sizeof(float), stream));
    for (int step = 0; step < kMuonSteps; ++step) {
      FOREBAY_RETURN_IF_ERROR(multiply(ProductKind::kGram, {x, nullptr, gram, k, n, k, a.state}, stream));
      FOREBAY_RETURN_IF_ERROR(
          multiply(ProductKind::kPolynomial, {gram, nullptr, square, k, k, k, a.state}, stream));
      FOREBAY_RETURN_IF_ERROR(multiply(ProductKind::kStep, {square, x, moved, k, k, n, a.state}, stream));
      std::swap(x, moved);
    }
    return move_matrix({x, moved, nullptr, k, n, is_tall, a.state}, stream);
  }

  Status muon_update(const Controlled<MuonUpdateArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const MuonUpdateArguments& u = a.part;
    if (u.count == 0) return Status();
    const void* const master = u.half.elements != nullptr ? static_cast<const void*>(u.half.elements)
                                                          : static_cast<const void*>(u.master);
    const bool aligned =
        head_of(
            u.count, kAccessBytes,
            {{u.gradient.values, 1}, {master, 1}, {u.m, 1}, {u.u, 1}, {u.average, 1}, {u.parameter, 1}}) == 0;
    return launch(muon_update_, cuda_kernels::RunLaunch<MuonUpdateArguments>{a, aligned}, run_tiles(u.count),
                  stream);
  }

  Status factor_sums(const Controlled<FactorSumsArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const FactoredShape& shape = a.part.run.shape;
    if (shape.factor_count() == 0) return Status();
    if (shape.has_rows) {
      FOREBAY_RETURN_IF_ERROR(launch(factor_rows_, cuda_kernels::FactorSumsLaunch{a, 1},
                                     laned_blocks(shape.row_count()), stream));
    }
    unsigned bands = 1;
    while (bands < cuda_kernels::kBandsMax && bands * kFactorBandRows < shape.rows) bands *= 2;
    const std::size_t width = kBlockSize / bands;
    return launch(factor_columns_, cuda_kernels::FactorSumsLaunch{a, bands},
                  (shape.columns + width - 1) / width * shape.batches, stream);
  }

  Status renew_factors(const Controlled<FactorRenewalArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const FactoredShape& shape = a.part.shape;
    if (shape.factor_count() == 0) return Status();
    FOREBAY_RETURN_IF_ERROR(launch(factor_renewal_, a, thread_blocks(shape.factor_count()), stream));
    return shape.has_rows ? launch(factor_means_, a, shape.batches, stream) : Status();
  }

  Status update_squares(const Controlled<UpdateSquaresArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const UpdateSquaresArguments& part = a.part;
    return add_leaves(update_leaves_, {part.run, part.factors, part.row_means, part.scratch, a.state},
                      part.result, stream);
  }

  Status parameter_squares(const Controlled<ParameterSquaresArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const ParameterSquaresArguments& part = a.part;
    FactoredRun masters;
    masters.gradient = part.masters, masters.type = part.type;
    masters.count = part.count, masters.place = part.place;
    return add_leaves(parameter_leaves_, {masters, nullptr, nullptr, part.scratch, a.state}, part.result,
                      stream);
  }

  Status adafactor_step(const Controlled<AdafactorStepArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    return launch(adafactor_step_, a, 1, stream);
  }

  Status factored_update(const Controlled<FactoredUpdateArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    const FactoredUpdateArguments& u = a.part;
    if (u.run.count == 0) return Status();
    const void* const master = u.half.elements != nullptr ? static_cast<const void*>(u.half.elements)
                                                          : static_cast<const void*>(u.master);
    const bool aligned = head_of(u.run.count, kAccessBytes,
                                 {{u.run.gradient, 1}, {master, 1}, {u.average, 1}, {u.parameter, 1}}) == 0;
    return launch(factored_update_, cuda_kernels::RunLaunch<FactoredUpdateArguments>{a, aligned},
                  run_tiles(u.run.count), stream);
  }

  Status keep_factors(const Controlled<KeepFactorsArguments>& a, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(check_arguments(a));
    if (a.part.count == 0) return Status();
    return launch(keep_factors_, a, thread_blocks(a.part.count), stream);
  }

  const char* description() const noexcept override { return description_.c_str(); }

 private:
  Status find(const std::string& name, Kernel& kernel) {
    FOREBAY_ASSIGN_OR_RETURN(kernel, backend_.get_kernel(module_, ("forebay_" + name).c_str()));
    return Status();
  }

  Status find_all() {
    for (const DataType type : kTypes) {
      const int i = index_of(type);
      const std::string name = std::string("_") + data_type_name(type);
      FOREBAY_RETURN_IF_ERROR(find("accumulate" + name, accumulate_[i]));
      FOREBAY_RETURN_IF_ERROR(find("add" + name, add_[i]));
      FOREBAY_RETURN_IF_ERROR(find("fill" + name, fill_[i]));
      FOREBAY_RETURN_IF_ERROR(find("norm_leaves" + name, norm_leaves_[i]));
      FOREBAY_RETURN_IF_ERROR(find("adamw" + name, adamw_[i][kTypeCount]));
      FOREBAY_RETURN_IF_ERROR(find("update" + name, update_[i][kTypeCount]));
      for (const DataType target : kTypes) {
        const int j = index_of(target);
        const std::string names = name + "_" + data_type_name(target);
        if (i != j) FOREBAY_RETURN_IF_ERROR(find("cast" + names, cast_[i][j]));
        if (i == j || target == DataType::kFloat32)
          FOREBAY_RETURN_IF_ERROR(find("scale" + names, scale_[i][j]));
        FOREBAY_RETURN_IF_ERROR(find("adamw" + names, adamw_[i][j]));
        FOREBAY_RETURN_IF_ERROR(find("update" + names, update_[i][j]));
      }
    }
    for (const MomentFormat format :
         {MomentFormat::kFloat32, MomentFormat::kBfloat16, MomentFormat::kBlock8}) {
      FOREBAY_RETURN_IF_ERROR(find(std::string("kept_update_") + moment_format_name(format),
                                   kept_update_[static_cast<std::size_t>(format)]));
    }
    FOREBAY_RETURN_IF_ERROR(find("norm_tree", norm_tree_));
    FOREBAY_RETURN_IF_ERROR(find("muon_momentum", muon_momentum_));
    FOREBAY_RETURN_IF_ERROR(find("muon_update", muon_update_));
    FOREBAY_RETURN_IF_ERROR(find("matrix_squares", matrix_squares_));
    FOREBAY_RETURN_IF_ERROR(find("matrix_norm", matrix_norm_));
    FOREBAY_RETURN_IF_ERROR(find("matrix_move", matrix_move_));
    FOREBAY_RETURN_IF_ERROR(find("matrix_gram", product(ProductKind::kGram)));
    FOREBAY_RETURN_IF_ERROR(find("matrix_polynomial", product(ProductKind::kPolynomial)));
    FOREBAY_RETURN_IF_ERROR(find("matrix_step", product(ProductKind::kStep)));
    FOREBAY_RETURN_IF_ERROR(find("factor_rows", factor_rows_));
    FOREBAY_RETURN_IF_ERROR(find("factor_columns", factor_columns_));
    FOREBAY_RETURN_IF_ERROR(find("factor_renewal", factor_renewal_));
    FOREBAY_RETURN_IF_ERROR(find("factor_means", factor_means_));
    FOREBAY_RETURN_IF_ERROR(find("keep_factors", keep_factors_));
    FOREBAY_RETURN_IF_ERROR(find("leaves_of_updates", update_leaves_));
    FOREBAY_RETURN_IF_ERROR(find("leaves_of_parameters", parameter_leaves_));
    FOREBAY_RETURN_IF_ERROR(find("chain", chain_));
    FOREBAY_RETURN_IF_ERROR(find("adafactor_step", adafactor_step_));
    FOREBAY_RETURN_IF_ERROR(find("factored_update", factored_update_));
    return find("step_control", step_control_);
  }

  static std::size_t run_tiles(std::size_t count) {
    return (count + cuda_kernels::kRunTile - 1) / cuda_kernels::kRunTile;
  }

  // Blocks with a thread for each element, and with one for each lane of each row or leaf.
  static std::size_t thread_blocks(std::size_t count) { return (count + kBlockSize - 1) / kBlockSize; }
  static std::size_t laned_blocks(std::size_t count) {
    constexpr std::size_t kRows = kBlockSize / definitions::kNormLanes;
    return (count + kRows - 1) / kRows;
  }

  // The sum of each leaf, and then of all.
  Status add_leaves(Kernel& kernel, const cuda_kernels::FactoredLeavesLaunch& a, double* result,
                    Stream stream) {
    const std::size_t count = cuda_kernels::leaves_of(a.run.place, a.run.count);
    if (count > 0) FOREBAY_RETURN_IF_ERROR(launch(kernel, a, laned_blocks(count), stream));
    return launch(chain_, cuda_kernels::ChainLaunch{a.leaves, count, result, a.state}, 1, stream);
  }

  Status move_matrix(const cuda_kernels::MatrixMoveLaunch& move, Stream stream) {
    constexpr std::size_t kSide = cuda_kernels::kTurnSide;
    const std::size_t squares = ((move.rows + kSide - 1) / kSide) * ((move.columns + kSide - 1) / kSide);
    return launch(matrix_move_, move, squares, stream);
  }

  Kernel& product(ProductKind kind) { return matrix_product_[static_cast<std::size_t>(kind)]; }
  Status multiply(ProductKind kind, const cuda_kernels::MatrixProductLaunch& a, Stream stream) {
    return launch(product(kind), a, cuda_kernels::product_tiles(kind, a.rows, a.columns), stream);
  }

  // `state` null: the launch's own factor and corrections.
  Status adamw_elements(const ControlledAdamWArguments& a, Stream stream) {
    const AdamWArguments& u = a.update;
    if (u.count == 0) return Status();
    const std::size_t bytes = element_bytes(u.gradient_type);
    const Operand gradient = {u.gradient, bytes}, p = {u.master, 4}, m = {u.m, 4}, v = {u.v, 4};
    const std::size_t granule = kAccessBytes / sizeof(float);
    Kernel* const row = (u.optimizer == Optimizer::kAdamW ? adamw_ : update_)[index_of(u.gradient_type)];
    if (u.parameter == nullptr) {
      return elements(row[kTypeCount], a, u.count, granule, {gradient, p, m, v}, stream);
    }
    const Operand parameter = {u.parameter, element_bytes(u.parameter_type)};
    return elements(row[index_of(u.parameter_type)], a, u.count, granule, {gradient, p, m, v, parameter},
                    stream);
  }

  template <typename Arguments>
  Status elements(Kernel kernel, const Arguments& arguments, std::size_t count, std::size_t granule,
                  std::initializer_list<Operand> operands, Stream stream) {
    const ElementLaunch<Arguments> elements = {arguments, head_of(count, granule, operands)};
    // Where nothing is aligned there is one element to a thread, not a granule.
    const std::size_t work = elements.head == count ? count : count / granule + 1;
    return launch(kernel, elements, (work + kBlockSize - 1) / kBlockSize, stream);
  }

  template <typename Launch>
  Status launch(Kernel kernel, const Launch& argument, std::size_t block_count, Stream stream) {
    Dimensions grid, block;
    grid.x = static_cast<std::uint32_t>(std::min(block_count, kBlocksPerProcessor * processor_count_));
    block.x = kBlockSize;
    return launch_with(backend_, kernel, grid, block, argument, stream);
  }

  Backend& backend_;
  std::size_t processor_count_;
  std::string description_;
  Module module_;
  // By type; cast and scale by source or rounding type and target; updates by gradient and parameter, the
  // last column for none.
  Kernel cast_[kTypeCount][kTypeCount], accumulate_[kTypeCount], scale_[kTypeCount][kTypeCount];
  Kernel add_[kTypeCount], fill_[kTypeCount], norm_leaves_[kTypeCount], adamw_[kTypeCount][kTypeCount + 1];
  Kernel update_[kTypeCount][kTypeCount + 1];  // The other optimizers.
  Kernel norm_tree_, step_control_;
  Kernel kept_update_[3];  // By format of the moments.
  Kernel muon_momentum_, muon_update_, matrix_squares_, matrix_norm_, matrix_move_;
  Kernel matrix_product_[3];  // By ProductKind.
  Kernel factor_rows_, factor_columns_, factor_renewal_, factor_means_, keep_factors_;
  Kernel update_leaves_, parameter_leaves_, chain_, adafactor_step_, factored_update_;
};

}  // namespace

Result<std::unique_ptr<Kernels>> create_cuda_kernels(Backend& backend) {
  auto kernels = std::make_unique<CudaKernels>(backend);
  FOREBAY_RETURN_IF_ERROR(kernels->load());
  return std::unique_ptr<Kernels>(std::move(kernels));
}

}  // namespace forebay
