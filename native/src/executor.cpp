#include "tutti/executor.h"

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>

#include "tutti/checksum.h"

namespace tutti {
namespace {

constexpr uint32_t kRecordsAtOnce = 64;

}  // namespace

void flip_bit(unsigned char* data, uint64_t bytes, uint64_t seed) noexcept {
  const uint64_t bit = checksum_mix(seed) % (bytes * 8);
  data[bit / 8] = static_cast<unsigned char>(data[bit / 8] ^ (1U << (bit % 8)));
}

Executor::Executor(Layout layout, std::vector<DeviceFile> devices, const SlotTable* table, FaultInjector* faults)
    : layout_(std::move(layout)), devices_(std::move(devices)), faults_(faults), table_(table) {
  if (devices_.size() != layout_.devices() || layout_.object_bytes % kLbaBytes != 0 ||
      layout_.payload_bytes > layout_.object_bytes) {
    throw std::invalid_argument("executor: devices or object sizes don't fit the layout");
  }
}

void Executor::start(std::vector<TensorRegion> regions) {
  if (started() || regions.size() != layout_.objects) {
    throw std::invalid_argument("executor: tensors must be registered once, one per object index");
  }
  regions_ = std::move(regions);
  for (const auto& region : regions_) {
    groups_ = std::max(groups_, region.group + 1);
  }
  merge_regions();
  try {
    start_workers();
  } catch (...) {
    stopping_.store(true, std::memory_order_release);
    announce();
    join_workers();
    throw;
  }
  started_.store(true, std::memory_order_release);
}

void Executor::merge_regions() {
  std::vector<std::pair<uint64_t, uint64_t>> whole;
  for (const auto& region : regions_) {
    if (region.blocks != 0) {
      whole.emplace_back(region.base, region.base + (region.blocks - 1) * region.stride + layout_.payload_bytes);
    }
  }
  std::sort(whole.begin(), whole.end());
  std::vector<std::pair<uint64_t, uint64_t>> merged;
  for (const auto& range : whole) {
    if (!merged.empty() && range.first <= merged.back().second) {
      merged.back().second = std::max(merged.back().second, range.second);
    } else {
      merged.push_back(range);
    }
  }
  const uint64_t longest = largest_range();
  for (const auto& [first, last] : merged) {
    for (uint64_t at = first; at < last; at += std::min(longest, last - at)) {
      ranges_.emplace_back(at, at + std::min(longest, last - at));
    }
  }
}

std::shared_ptr<Plan> Executor::submit(Direction direction, std::vector<uint32_t> slots,
                                       std::vector<uint32_t> generations, std::vector<uint8_t> rots,
                                       std::vector<uint32_t> blocks, Clock::time_point deadline, uint64_t stream) {
  if (!started() || stopping()) {
    throw std::runtime_error("executor: not running");
  }
  if (blocks.size() != slots.size() * groups_) {
    throw std::invalid_argument("executor: blocks must have one entry per slot and group of layers");
  }
  auto plan = std::make_shared<Plan>(direction, layout_, std::move(slots), std::move(generations), std::move(rots),
                                     std::move(blocks), deadline);
  plan->ticket = stream == kNoStream ? 0 : mark(stream);
  if (plan->blocks() != 0) {
    {
      const std::lock_guard lock(mutex_);
      // Reads go before every write that is still waiting: a request waits for them.
      const auto at = direction == Direction::Write
                          ? waiting_.end()
                          : std::find_if(waiting_.begin(), waiting_.end(),
                                         [](const auto& other) { return other->direction == Direction::Write; });
      waiting_.insert(at, plan);
      active_.push_back(plan);
    }
    announce();
  }
  return plan;
}

void Executor::stop(std::chrono::milliseconds grace) {
  if (!started()) {
    return;
  }
  std::vector<std::shared_ptr<Plan>> running;
  {
    const std::lock_guard lock(mutex_);
    running = active_;
  }
  const auto until = Clock::now() + grace;
  for (const auto& plan : running) {
    if (!plan->wait(until)) {
      plan->end_early(Status::Cancelled);
    }
  }
  if (faults_ != nullptr) {
    faults_->release();
  }
  stopping_.store(true, std::memory_order_release);
  announce();
  join_workers();
  started_.store(false, std::memory_order_release);
}

// --- expanding plans into the ring ---

void Executor::expect(Plan& plan, uint32_t blocks) {
  const uint32_t first = layout_.rank * layout_.objects;
  while (plan.expected < blocks && !plan.ended_early()) {
    // Slots that were taken together mostly lie together: their records are read at once.
    const uint32_t block = plan.expected;
    uint32_t run = 1;
    while (run < kRecordsAtOnce && block + run < plan.blocks() && plan.slots[block + run] == plan.slots[block] + run) {
      ++run;
    }
    std::array<Status, kRecordsAtOnce> statuses{};
    table_->read_sums(plan.slots[block], std::span(plan.generations).subspan(block, run), first, layout_.objects,
                      std::span(plan.sums).subspan(static_cast<size_t>(block) * layout_.objects,
                                                   static_cast<size_t>(run) * layout_.objects),
                      std::span(statuses).first(run));
    for (uint32_t i = 0; i < run; ++i) {
      if (statuses[i] != Status::Ok) {
        plan.fail_block(block + i, statuses[i]);
      }
    }
    plan.expected += run;
  }
}

void Executor::fill(Iocb& iocb, Plan& plan, uint64_t first, uint32_t count) {
  iocb.header.direction = plan.direction;
  iocb.header.num_ioctx = static_cast<uint16_t>(count);
  iocb.header.plan = reinterpret_cast<uint64_t>(&plan);
  iocb.header.first_item = first;
  iocb.header.device_mask = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const Item item = plan.item(first + i);
    if (plan.direction == Direction::Read) {
      expect(plan, item.block + 1);
    }
    const Address address = layout_.address(plan.slots[item.block], plan.rots[item.block], item.object);
    const TensorRegion& region = regions_[item.object];
    const uint32_t engine_block = plan.engine_block(region.group, item.block);
    const bool nothing = engine_block == kNoEngineBlock || plan.skip(item.block);
    const uint64_t memory = nothing ? 0 : region.base + engine_block * region.stride;
    uint32_t buffer = kNoBuffer;
    const auto range = std::upper_bound(ranges_.begin(), ranges_.end(), std::make_pair(memory, UINT64_MAX));
    if (range != ranges_.begin() && memory + layout_.payload_bytes <= std::prev(range)->second) {
      buffer = static_cast<uint32_t>(std::prev(range) - ranges_.begin());
    }
    iocb.header.device_mask |= uint64_t{1} << (address.device % 64);
    iocb.contexts[i] = Ioctx{.descriptor_lo = memory,
                             .descriptor_hi = layout_.payload_bytes | static_cast<uint64_t>(buffer) << 32,
                             .lba = address.offset / kLbaBytes,
                             .blocks_flags = static_cast<uint32_t>(layout_.object_bytes / kLbaBytes - 1),
                             .device = static_cast<uint16_t>(address.device),
                             .status_slot = static_cast<uint16_t>(i)};
  }
}

void Executor::feed() {
  const std::unique_lock feeding(feed_mutex_, std::try_to_lock);
  if (!feeding.owns_lock()) {
    return;
  }
  for (;;) {
    std::shared_ptr<Plan> plan;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) {
        return;
      }
      plan = waiting_.front();
    }
    if (!plan->ended_early() && !reached(plan->ticket)) {
      return;
    }
    if (plan->sums.empty()) {
      plan->sums.assign(plan->items(), 0);
    }
    while (plan->next_item < plan->items()) {
      const uint32_t batch = std::min(contexts_per_iocb(*plan), kIoctxPerIocb);
      Iocb* iocb = obtain();
      if (iocb == nullptr) {
        return;
      }
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(batch, plan->items() - plan->next_item));
      fill(*iocb, *plan, plan->next_item, count);
      plan->next_item += count;
      issue(*iocb, *plan);
    }
    const std::lock_guard lock(mutex_);
    std::erase(waiting_, plan);
  }
}

void Executor::announce() {
  const std::lock_guard lock(mutex_);
  epoch_.fetch_add(1, std::memory_order_acq_rel);
  work_.notify_all();
}

void Executor::wait_for_work(uint64_t seen) {
  std::unique_lock lock(mutex_);
  std::erase_if(active_, [](const auto& plan) { return plan->drained(); });
  const auto longest = active_.empty() ? std::chrono::milliseconds(500) : std::chrono::milliseconds(2);
  work_.wait_for(lock, longest, [this, seen] { return epoch() != seen; });
}

void Executor::expire_plans() {
  std::vector<std::shared_ptr<Plan>> late;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (const auto& plan : active_) {
      if (now >= plan->deadline && !plan->ended_early()) {
        late.push_back(plan);
      }
    }
  }
  for (const auto& plan : late) {
    stats_.timeouts.fetch_add(1, std::memory_order_relaxed);
    plan->end_early(Status::Timeout);
  }
}

void Executor::note(std::string what) {
  const std::lock_guard lock(mutex_);
  note_ = std::move(what);
}

std::string Executor::note() const {
  const std::lock_guard lock(mutex_);
  return note_;
}

void Executor::count(Direction direction, Status status) noexcept {
  if (status == Status::Ok) {
    auto& bytes = direction == Direction::Read ? stats_.bytes_read : stats_.bytes_written;
    auto& objects = direction == Direction::Read ? stats_.objects_read : stats_.objects_written;
    bytes.fetch_add(layout_.object_bytes, std::memory_order_relaxed);
    objects.fetch_add(1, std::memory_order_relaxed);
  } else if (status == Status::ChecksumError) {
    stats_.checksum_errors.fetch_add(1, std::memory_order_relaxed);
  } else if (status != Status::Cancelled) {
    stats_.device_errors.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace tutti
