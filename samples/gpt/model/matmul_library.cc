// Products by oneDNN in fp32. The second operand is reordered into the blocked layout that oneDNN asks for.
// This copy and oneDNN's scratch memory lie in the caller's workspace, so the plan counts all memory that
// grows with the model.

#include <string>
#include <utility>

#include "forebay/error.h"
#include "model/matmul.h"

#if FOREBAY_HAVE_ONEDNN
#include <algorithm>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>

#include "forebay/units.h"
#endif

namespace forebay::gpt {

#if FOREBAY_HAVE_ONEDNN
namespace {

using dnnl::memory;

constexpr std::size_t kAlignment = 64;

memory::desc matrix(std::size_t rows, std::size_t columns, memory::format_tag tag) {
  const memory::dims extents = {static_cast<memory::dim>(rows), static_cast<memory::dim>(columns)};
  return {extents, memory::data_type::f32, tag};
}

dnnl::primitive_attr own_scratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const memory::desc& a,
                                      const memory::desc& b, const memory::desc& c) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, a, b, c, own_scratchpad()};
#else
  return {dnnl::matmul::desc(a, b, c), own_scratchpad(), engine};
#endif
}

// One shape's primitives and where their memory lies in the workspace.
class Product {
 public:
  Product(const dnnl::engine& engine, const ProductShape& shape)
      : a_desc_(matrix(shape.rows, shape.depth, tag(shape.transpose_a))),
        b_desc_(matrix(shape.depth, shape.columns, tag(shape.transpose_b))),
        c_desc_(matrix(shape.rows, shape.columns, memory::format_tag::ab)),
        product_desc_(
            describe(engine, a_desc_, matrix(shape.depth, shape.columns, memory::format_tag::any), c_desc_)),
        packs_(product_desc_.weights_desc() != b_desc_),
        product_(product_desc_) {
    if (packs_) {
      pack_desc_ = dnnl::reorder::primitive_desc(engine, b_desc_, engine, product_desc_.weights_desc(),
                                                 own_scratchpad());
      pack_ = dnnl::reorder(pack_desc_);
      packed_bytes_ = round_up(product_desc_.weights_desc().get_size(), kAlignment);
      scratch_bytes_ = pack_desc_.scratchpad_desc().get_size();
    }
    // The two run one after the other and share their scratch memory.
    scratch_bytes_ = std::max<std::size_t>(scratch_bytes_, product_desc_.scratchpad_desc().get_size());
  }

  std::size_t workspace_bytes() const { return packed_bytes_ + round_up(scratch_bytes_, kAlignment); }

  void run(const dnnl::engine& engine, dnnl::stream& stream, const float* a, const float* b, float* c,
           std::byte* workspace) {
    const auto at = [&](const memory::desc& desc, const void* data) {
      return memory(desc, engine, const_cast<void*>(data));  // oneDNN has no read-only memory.
    };
    std::byte* scratch = workspace + packed_bytes_;
    const memory source = at(b_desc_, b);
    const memory weights = packs_ ? at(product_desc_.weights_desc(), workspace) : source;
    if (packs_) {
      pack_.execute(stream, {{DNNL_ARG_FROM, source},
                             {DNNL_ARG_TO, weights},
                             {DNNL_ARG_SCRATCHPAD, at(pack_desc_.scratchpad_desc(), scratch)}});
    }
    product_.execute(stream, {{DNNL_ARG_SRC, at(a_desc_, a)},
                              {DNNL_ARG_WEIGHTS, weights},
                              {DNNL_ARG_DST, at(c_desc_, c)},
                              {DNNL_ARG_SCRATCHPAD, at(product_desc_.scratchpad_desc(), scratch)}});
    stream.wait();
  }

 private:
  static memory::format_tag tag(bool transpose) {
    return transpose ? memory::format_tag::ba : memory::format_tag::ab;
  }

  memory::desc a_desc_, b_desc_, c_desc_;
  dnnl::matmul::primitive_desc product_desc_;
  bool packs_;
  dnnl::matmul product_;
  dnnl::reorder::primitive_desc pack_desc_;
  dnnl::reorder pack_;
  std::size_t packed_bytes_ = 0;
  std::size_t scratch_bytes_ = 0;
};

class LibraryMatMul final : public MatMul {
 public:
  const char* name() const noexcept override { return "library"; }

  std::size_t prepare(const ProductShape& shape) override {
    auto place = products_.find(shape);
    if (place == products_.end()) place = products_.emplace(shape, Product(engine_, shape)).first;
    return place->second.workspace_bytes();
  }

  void multiply(const ProductShape& shape, const float* a, const float* b, float* c,
                std::byte* workspace) override {
    products_.at(shape).run(engine_, stream_, a, b, c, workspace);
  }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<ProductShape, Product> products_;
};

}  // namespace

bool library_matmul_available() noexcept {
  return true;
}

std::unique_ptr<MatMul> create_library_matmul() {
  return std::make_unique<LibraryMatMul>();
}

#else

bool library_matmul_available() noexcept {
  return false;
}

std::unique_ptr<MatMul> create_library_matmul() {
  throw Error(StatusCode::kUnsupported,
              "--matmul library: this build has no oneDNN; use --matmul plain, or install libdnnl-dev and "
              "build again");
}

#endif

}  // namespace forebay::gpt
