#include "runtime/engine/activations/tier.h"

#include <cstring>

#include "forebay/error.h"
#include "forebay/file_store.h"
#include "forebay/log.h"
#include "forebay/units.h"
#include "runtime/engine/activations/constants.h"
#include "runtime/engine/engine_hooks.h"

namespace forebay {

std::unique_ptr<ActivationTier> ActivationTier::create(Backend& backend, const ActivationPlan& plan,
                                                       const ActivationCheckpointerOptions& options,
                                                       int rank) {
  std::unique_ptr<ActivationTier> tier(new ActivationTier(backend));
  PinnedPoolOptions pool;
  pool.limit_bytes = round_up(plan.options.host_bytes, kActivationPageBytes);
  pool.slab_bytes = 1;  // The requested bytes and no more.
  tier->pool_ = value_or_throw(PinnedPool::create(backend, pool));
  if (plan.options.tier == Tier::kFile) {
    tier->open_store(plan, options, rank);
    return tier;
  }
  tier->host_ = value_or_throw(tier->pool_->allocate(plan.host_spilled_bytes));
  // On a model backend nothing is copied, and the memory would be the machine's.
  if (backend.capabilities().kind != BackendKind::kModel)
    std::memset(tier->host_, 0, plan.host_spilled_bytes);
  tier->down_ = value_or_throw(backend.stream_create());
  tier->up_ = value_or_throw(backend.stream_create());
  return tier;
}

ActivationTier::~ActivationTier() {
  mover_down_.reset();
  mover_up_.reset();
  if (store_ != nullptr) return;
  for (const Stream stream : {down_, up_}) {
    if (stream.handle == nullptr) continue;
    Status status = backend_.stream_synchronize(stream);
    const Status destroyed = backend_.stream_destroy(stream);
    if (status.ok()) status = destroyed;
    if (!status.ok()) log(LogLevel::kWarning, "closing an activation tier: %s", status.message().c_str());
  }
}

void ActivationTier::open_store(const ActivationPlan& plan, const ActivationCheckpointerOptions& options,
                                int rank) {
  if (options.hooks != nullptr && options.hooks->make_store) {
    store_ = value_or_throw(options.hooks->make_store(rank));
  } else {
    FileStoreOptions files;
    files.directories = options.directories;
    store_ = value_or_throw(make_file_store(files));
  }
  for (std::unique_ptr<StagingBuffers>& buffers : buffers_) {
    buffers = value_or_throw(StagingBuffers::create(
        *pool_, {.buffer_bytes = plan.file_piece_bytes, .buffer_count = kActivationMoverBuffers}));
    throw_if_error(store_->register_memory(buffers->memory().data(), buffers->memory().size()));
  }
  mover_down_ = value_or_throw(Mover::create(backend_, *store_, *buffers_[0]));
  mover_up_ = value_or_throw(Mover::create(backend_, *store_, *buffers_[1]));
  down_ = mover_down_->stream();
  up_ = mover_up_->stream();
}

ActivationTier::Home ActivationTier::make_home(const std::string& name, std::uint64_t bytes) {
  Home home;
  home.bytes = bytes;
  if (store_ == nullptr) {
    home.host = host_ + host_used_;
    host_used_ += round_up(bytes, kActivationAlignment);
    return home;
  }
  home.range_bytes = round_up(bytes, kActivationPageBytes);
  home.range = value_or_throw(store_->create_range(name, home.range_bytes));
  return home;
}

Status ActivationTier::spill(const std::byte* source, const Home& home) {
  if (store_ != nullptr) return mover_down_->spill(source, {home.range, 0, home.bytes, home.range_bytes});
  return backend_.copy_async(home.host, source, home.bytes, down_);
}

Status ActivationTier::fetch(const Home& home, DevicePtr target) {
  if (store_ != nullptr) return mover_up_->fetch({home.range, 0, home.bytes, home.range_bytes}, target);
  return backend_.copy_async(target, home.host, home.bytes, up_);
}

Status ActivationTier::status() const {
  if (store_ == nullptr) return {};
  const Status down = mover_down_->status();
  return down.ok() ? mover_up_->status() : down;
}

}  // namespace forebay
