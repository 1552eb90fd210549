#include "runtime/command/state/torch_file.h"

#include <cstring>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay {
namespace {

using Kind = PickleValue::Kind;

// Dimensions of a tensor. PyTorch allows 64.
constexpr std::size_t kMostDimensions = 64;
constexpr std::size_t kVectorBytes = 64;  // A vector takes these beside its numbers.
// Wrappers of a tensor: a parameter of a tensor with attributes.
constexpr int kMostWrappers = 4;

struct StoredType {
  std::string_view name;     // That of its storage, "torch.FloatStorage" without the rest.
  std::string_view element;  // "torch.float32".
  std::uint64_t bytes;
};
constexpr StoredType kStoredTypes[] = {{"Float", "torch.float32", 4}, {"BFloat16", "torch.bfloat16", 2},
                                       {"Half", "torch.float16", 2},  {"Double", "torch.float64", 8},
                                       {"Long", "torch.int64", 8},    {"Int", "torch.int32", 4},
                                       {"Short", "torch.int16", 2},   {"Char", "torch.int8", 1},
                                       {"Byte", "torch.uint8", 1},    {"Bool", "torch.bool", 1}};

const StoredType* stored_type(std::string_view name) {
  for (const StoredType& type : kStoredTypes) {
    const std::string storage = "torch." + std::string(type.name) + "Storage";
    if (name == storage || name == type.element) return &type;
  }
  return nullptr;
}

// "byte 12: an operand of ...", without the advice, which is for another kind of file.
std::string finding_of(const Status& status) {
  return status.message().substr(0, status.message().find("; "));
}

bool is_contiguous(const std::vector<std::uint64_t>& shape, const std::vector<std::uint64_t>& strides) {
  std::uint64_t expected = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

}  // namespace

Pickle read_pickle(const std::string& path, std::string_view text, const PickleLimits& limits) {
  Result<Pickle> pickle = Pickle::read(text, limits, PickleNames::kAll);
  if (!pickle.ok()) refuse_import(path, "its pickle cannot be read, " + finding_of(pickle.status()));
  return std::move(pickle).value();
}

std::optional<std::vector<std::uint64_t>> numbers_of(const Pickle& pickle, const PickleValue& value) {
  const PickleValue* list = &value;
  if (pickle.name_of(value) == "torch.Size" && pickle.arguments(value).size() == 1)
    list = &pickle.arguments(value).front();
  if (list->kind != Kind::kList) return std::nullopt;
  std::vector<std::uint64_t> numbers;
  if (!pickle.may_copy(kVectorBytes + pickle.items(*list).size() * sizeof(numbers[0]))) return std::nullopt;
  for (const PickleValue& number : pickle.items(*list)) {
    if (number.kind != Kind::kInteger || number.integer < 0) return std::nullopt;
    numbers.push_back(static_cast<std::uint64_t>(number.integer));
  }
  return numbers;
}

std::optional<std::uint64_t> number_of(const Pickle& pickle, const PickleValue& value) {
  const PickleValue* number = &value;
  if (value.kind == Kind::kObject && pickle.arguments(value).size() == 1)
    number = &pickle.arguments(value).front();
  if (number->kind != Kind::kInteger || number->integer < 0) return std::nullopt;
  return static_cast<std::uint64_t>(number->integer);
}

std::optional<std::uint64_t> element_count(const std::vector<std::uint64_t>& shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) {
    if (__builtin_mul_overflow(count, extent, &count)) return std::nullopt;
  }
  return count;
}

std::optional<DataType> TorchTensor::float_type() const {
  if (type == "Float") return DataType::kFloat32;
  if (type == "BFloat16") return DataType::kBfloat16;
  if (type == "Half") return DataType::kFloat16;
  return std::nullopt;
}

TorchFile::TorchFile(const InputFile& file, std::uint64_t begin, std::uint64_t bytes)
    : file_(file), archive_(file, begin, bytes), root_(archive_.root(file)) {
  if (const std::string name = root_ + "/byteorder"; archive_.has(name)) {
    const ZipArchive::Place order = archive_.find(file, name);
    if (order.bytes > 16 || file.text(order.at, order.bytes) != "little") {
      throw Error(StatusCode::kUnsupported,
                  shown_path(file.path()) +
                      " has its numbers in big endian; load it and save it again on a common processor");
    }
  }
  const ZipArchive::Place place = archive_.find(file, root_ + "/data.pkl");
  if (place.bytes > kMostPickleBytes) refuse("its pickle is too long");
  text_ = file.text(place.at, place.bytes);
  // A pickle has at most a value a byte.
  pickle_ =
      read_pickle(file.path(), text_, {.values = std::size_t{1} << 24, .containers = std::size_t{1} << 22});
}

std::optional<TorchTensor> TorchFile::tensor(const PickleValue& given) const {
  const PickleValue* value = &given;
  const std::vector<PickleValue>* arguments = nullptr;
  std::string_view name;
  for (int wrapper = 0; wrapper < kMostWrappers; ++wrapper) {
    name = pickle_.name_of(*value);
    if (value->kind != Kind::kObject) return std::nullopt;
    arguments = &pickle_.arguments(*value);
    if (name == "torch._tensor._rebuild_from_type_v2" && arguments->size() >= 3) {
      name = pickle_.name_of((*arguments)[0]);  // Called with the third argument.
      arguments = &pickle_.items((*arguments)[2]);
    }
    const bool is_parameter =
        name == "torch._utils._rebuild_parameter" || name == "torch._utils._rebuild_parameter_with_state";
    if (!is_parameter || arguments->empty()) break;
    value = &arguments->front();
  }
  const bool has_type = name == "torch._utils._rebuild_tensor_v3";
  if (name != "torch._utils._rebuild_tensor_v2" && !has_type) return std::nullopt;
  const std::vector<PickleValue>& parts = *arguments;
  if (parts.size() < (has_type ? 7u : 4u)) refuse("a tensor has too few arguments");

  const std::vector<PickleValue>& storage = pickle_.arguments(parts[0]);
  if (pickle_.name_of(parts[0]) != Pickle::kPersistentId || storage.size() < 5 ||
      Pickle::text_of(storage[0]) != "storage")
    refuse("a tensor has no storage");
  const std::string_view key = Pickle::text_of(storage[2]);
  const std::string_view type_name = pickle_.name_of(has_type ? parts[6] : storage[1]);
  const StoredType* const type = stored_type(type_name);
  if (type == nullptr) {
    throw Error(StatusCode::kUnsupported, shown_path(file_.path()) + " has a tensor of type " +
                                              shown_value(type_name) +
                                              "; weights and moments are fp32, bf16 or fp16");
  }
  // A view whose values are not the stored ones.
  if (const std::size_t metadata = has_type ? 7 : 6; parts.size() > metadata) {
    const PickleValue* const negative = pickle_.find(parts[metadata], "neg");
    if (negative != nullptr && (negative->kind != Kind::kBool || negative->integer != 0))
      throw Error(StatusCode::kUnsupported, shown_path(file_.path()) +
                                                " has a tensor that is a negative view (storage " +
                                                shown_value(key) + "); save its resolve_neg()");
  }
  const std::optional<std::vector<std::uint64_t>> shape = numbers_of(pickle_, parts[2]);
  const std::optional<std::vector<std::uint64_t>> strides = numbers_of(pickle_, parts[3]);
  const std::optional<std::uint64_t> offset = number_of(pickle_, parts[1]);
  if (!shape || !strides || !offset || strides->size() != shape->size() || shape->size() > kMostDimensions)
    refuse("a tensor has no shape");
  const std::optional<std::uint64_t> count = element_count(*shape);
  const ZipArchive::Place place = archive_.find(file_, root_ + "/data/" + std::string(key));
  const std::uint64_t stored = place.bytes / type->bytes;
  if (!count || *offset > stored || *count > stored - *offset)
    refuse("tensor " + shown_value(key) + " has more elements than its storage");
  if (*count > 0 && !is_contiguous(*shape, *strides)) {
    throw Error(StatusCode::kUnsupported,
                shown_path(file_.path()) + " has a tensor that is not contiguous (storage " +
                    shown_value(key) + "); make weights and moments contiguous() before they are saved");
  }
  return TorchTensor{*shape, *count, place.at + *offset * type->bytes, std::string(type->name)};
}

std::optional<double> TorchFile::scalar(const PickleValue& value) const {
  if (value.kind == Kind::kInteger) return static_cast<double>(value.integer);
  if (value.kind == Kind::kFloat) return value.number;
  const std::optional<TorchTensor> found = tensor(value);
  if (!found || found->count != 1) return std::nullopt;
  const auto read = [&](auto number) {
    file_.read_at(found->at, &number, sizeof number);
    return static_cast<double>(number);
  };
  if (found->type == "Float") return read(float());
  if (found->type == "Double") return read(double());
  if (found->type == "Long") return read(std::int64_t());
  if (found->type == "Int") return read(std::int32_t());
  return std::nullopt;
}

}  // namespace forebay
