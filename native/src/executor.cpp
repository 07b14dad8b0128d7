#include "tutti/executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <future>
#include <stdexcept>
#include <system_error>

#include "tutti/checksum.h"

namespace tutti {
namespace {

constexpr uint64_t kLargestRegistration = uint64_t{1} << 30;  // the kernel's limit for one buffer

void flip_bit(unsigned char* data, uint64_t bytes, uint64_t seed) noexcept {
  const uint64_t bit = checksum_mix(seed) % (bytes * 8);
  data[bit / 8] = static_cast<unsigned char>(data[bit / 8] ^ (1U << (bit % 8)));
}

// Pages that aren't there yet come as huge ones, where the system allows it: a command then has fewer segments, and the
// checksum fewer TLB misses. A hint, whose failure changes nothing.
void ask_for_huge_pages(uint64_t first, uint64_t last) noexcept {
  constexpr uint64_t kHugePage = 2 << 20;
  const uint64_t from = (first + kHugePage - 1) / kHugePage * kHugePage;
  const uint64_t to = last / kHugePage * kHugePage;
  if (from < to) {
    madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
  }
}

}  // namespace

Executor::Executor(Layout layout, std::vector<DeviceFile> devices, ExecutorOptions options, const SlotTable* table,
                   FaultInjector* faults)
    : layout_(std::move(layout)),
      devices_(std::move(devices)),
      options_(options),
      table_(table),
      faults_(faults),
      ring_(std::max<uint32_t>(options.iocbs, 2)) {
  if (devices_.size() != layout_.devices() || layout_.object_bytes % kLbaBytes != 0 ||
      layout_.payload_bytes > layout_.object_bytes) {
    throw std::invalid_argument("executor: devices or object sizes don't fit the layout");
  }
}

Executor::~Executor() { stop(std::chrono::milliseconds(0)); }

bool Executor::direct_possible(const TensorRegion& region, const DeviceFile& device) const noexcept {
  const auto aligned = [](uint64_t value, uint64_t to) { return to <= 1 || value % to == 0; };
  return layout_.payload_bytes == layout_.object_bytes && aligned(layout_.object_bytes, device.offset_align) &&
         aligned(region.base, device.memory_align) && aligned(region.stride, device.memory_align);
}

void Executor::start(std::vector<TensorRegion> regions) {
  if (started() || regions.size() != layout_.objects) {
    throw std::invalid_argument("executor: tensors must be registered once, one per object index");
  }
  regions_ = std::move(regions);
  for (const auto& region : regions_) {
    groups_ = std::max(groups_, region.group + 1);
  }
  staged_.assign(static_cast<size_t>(layout_.objects) * devices_.size(), 0);
  for (uint32_t object = 0; object < layout_.objects; ++object) {
    for (uint32_t device = 0; device < devices_.size(); ++device) {
      staged_[object * devices_.size() + device] = direct_possible(regions_[object], devices_[device]) ? 0 : 1;
    }
  }
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
  for (const auto& [first, last] : merged) {
    ask_for_huge_pages(first, last);
    for (uint64_t at = first; options_.register_buffers && at < last; at += kLargestRegistration) {
      ranges_.emplace_back(at, std::min(at + kLargestRegistration, last));
    }
  }
  std::vector<std::future<void>> started;
  std::exception_ptr failure;
  try {
    for (uint32_t lane = 0; lane < options_.lanes; ++lane) {
      auto ready = std::make_shared<std::promise<void>>();
      started.push_back(ready->get_future());
      lanes_.emplace_back([this, ready] {
        bool running = false;
        const auto tell = [&] {
          running = true;
          ready->set_value();
        };
        try {
          options_.kind == ExecutorKind::Uring ? run_uring_lane(*this, tell) : run_posix_lane(*this, tell);
        } catch (...) {
          if (running) {
            throw;  // a lane that runs throws nothing: a broken invariant
          }
          ready->set_exception(std::current_exception());
        }
      });
    }
  } catch (const std::system_error&) {  // no more threads
    started.pop_back();
    failure = std::current_exception();
  }
  for (auto& lane : started) {
    try {
      lane.get();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) {
    stop(std::chrono::milliseconds(0));
    std::rethrow_exception(failure);
  }
}

std::vector<std::pair<uint64_t, uint64_t>> Executor::registered_ranges() const { return ranges_; }

std::shared_ptr<Plan> Executor::submit(Direction direction, std::vector<uint32_t> slots,
                                       std::vector<uint32_t> generations, std::vector<uint8_t> rots,
                                       std::vector<uint32_t> blocks, Clock::time_point deadline) {
  if (!started() || stopping()) {
    throw std::runtime_error("executor: not running");
  }
  if (blocks.size() != slots.size() * groups_) {
    throw std::invalid_argument("executor: blocks must have one entry per slot and group of layers");
  }
  auto plan = std::make_shared<Plan>(direction, layout_, std::move(slots), std::move(generations), std::move(rots),
                                     std::move(blocks), deadline);
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
  if (lanes_.empty()) {
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
  for (auto& lane : lanes_) {
    lane.join();
  }
  lanes_.clear();
}

// --- expanding plans into the ring ---

void Executor::expect(Plan& plan, uint32_t blocks) {
  const uint32_t first = layout_.rank * layout_.objects;
  for (; plan.expected < blocks && !plan.ended_early(); ++plan.expected) {
    const uint32_t block = plan.expected;
    const std::span<uint64_t> out(plan.sums.data() + static_cast<size_t>(block) * layout_.objects, layout_.objects);
    if (const Status status = table_->read_sums(plan.slots[block], plan.generations[block], first, out);
        status != Status::Ok) {
      plan.fail_block(block, status);
    }
  }
}

void Executor::fill(Iocb& iocb, const std::shared_ptr<Plan>& plan, uint64_t first, uint32_t count) {
  iocb.header.direction = plan->direction;
  iocb.header.num_ioctx = static_cast<uint16_t>(count);
  iocb.header.plan = reinterpret_cast<uint64_t>(plan.get());
  iocb.header.first_item = first;
  iocb.header.device_mask = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const Item item = plan->item(first + i);
    if (plan->direction == Direction::Read) {
      expect(*plan, item.block + 1);
    }
    const Address address = layout_.address(plan->slots[item.block], plan->rots[item.block], item.object);
    const TensorRegion& region = regions_[item.object];
    const uint32_t engine_block = plan->engine_block(region.group, item.block);
    const uint64_t memory = engine_block == kNoEngineBlock ? 0 : region.base + engine_block * region.stride;
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
  while (ring_.reap()) {
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
    if (plan->sums.empty()) {
      plan->sums.assign(plan->items(), 0);
    }
    // Small enough that the lanes come to the end of each layer at about the same time.
    const uint64_t share = plan->blocks() / (uint64_t{4} * options_.lanes);
    const auto batch = static_cast<uint32_t>(std::clamp<uint64_t>(share, 8, 256));
    while (plan->next_item < plan->items()) {
      Iocb* iocb = ring_.get_iocb();
      if (iocb == nullptr) {
        return;
      }
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(batch, plan->items() - plan->next_item));
      fill(*iocb, plan, plan->next_item, count);
      plan->next_item += count;
      ring_.issue(*iocb);
      announce();
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

Iocb* Executor::next_iocb() {
  if (Iocb* iocb = ring_.take(); iocb != nullptr) {
    return iocb;
  }
  feed();
  return ring_.take();
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

void Executor::hang_until_released() {
  const uint64_t before = faults_->releases();
  while (faults_->releases() == before && !stopping()) {
    expire_plans();
    wait_for_work(epoch());
  }
}

void Executor::note_buffers(std::string why) {
  const std::lock_guard lock(mutex_);
  buffer_note_ = std::move(why);
}

std::string Executor::buffer_note() const {
  const std::lock_guard lock(mutex_);
  return buffer_note_;
}

// --- one object ---

void Executor::end_item(Iocb& iocb, Plan& plan, Item item, uint16_t status_slot, Status status) noexcept {
  const auto keep = plan.shared_from_this();  // the last item's end lets the others forget the plan
  ring_.complete(iocb, status_slot, status);
  plan.object_done(item, status);
}

bool Executor::begin(Iocb& iocb, uint16_t index, unsigned char* staging, Transfer& transfer) {
  const Ioctx& context = iocb.contexts[index];
  auto* plan = reinterpret_cast<Plan*>(iocb.header.plan);
  const Item item = plan->item(iocb.header.first_item + index);
  if (plan->skip(item.block)) {
    end_item(iocb, *plan, item, index, Status::Cancelled);
    return false;
  }
  if (context.descriptor_lo == 0) {  // no engine block: nothing to read
    end_item(iocb, *plan, item, index, Status::Ok);
    return false;
  }
  transfer = Transfer{};
  transfer.iocb = &iocb;
  transfer.item = item;
  transfer.status_slot = index;
  transfer.device = context.device;
  transfer.offset = context.lba * kLbaBytes;
  transfer.tensor = reinterpret_cast<unsigned char*>(context.descriptor_lo);
  transfer.buffer = transfer.tensor;
  transfer.registered = static_cast<uint32_t>(context.descriptor_hi >> 32);
  if (faults_ != nullptr) {
    transfer.fault = faults_->decide(plan->direction, transfer.device);
  }
  const bool corrupt_write = transfer.fault.kind == FaultKind::Corrupt && plan->direction == Direction::Write;
  if (staged_[item.object * devices_.size() + transfer.device] != 0 || corrupt_write) {
    transfer.buffer = staging;
    transfer.registered = kNoBuffer;
    stats_.staged_objects.fetch_add(1, std::memory_order_relaxed);
  }
  if (plan->direction == Direction::Write) {
    plan->sum(item) = multilinear64(transfer.tensor, layout_.payload_bytes);
    if (transfer.buffer != transfer.tensor) {
      std::memcpy(transfer.buffer, transfer.tensor, layout_.payload_bytes);
      std::memset(transfer.buffer + layout_.payload_bytes, 0, layout_.object_bytes - layout_.payload_bytes);
    }
    if (corrupt_write) {
      flip_bit(transfer.buffer, layout_.payload_bytes, transfer.fault.seed);
    }
  }
  return true;
}

void Executor::finish(Transfer& transfer, int64_t result) {
  auto* plan = reinterpret_cast<Plan*>(transfer.iocb->header.plan);
  Status status = status_of_result(result, layout_.object_bytes);
  if (transfer.fault.kind == FaultKind::Error) {
    status = status_of_result(-transfer.fault.error, layout_.object_bytes);
  } else if (transfer.fault.kind == FaultKind::Short) {
    status = Status::ShortIo;
  }
  if (plan->direction == Direction::Read && status == Status::Ok) {
    if (transfer.fault.kind == FaultKind::Corrupt) {
      flip_bit(transfer.buffer, layout_.payload_bytes, transfer.fault.seed);
    }
    // Over the destination's bytes: what the engine will read is what was checked.
    if (transfer.buffer != transfer.tensor) {
      std::memcpy(transfer.tensor, transfer.buffer, layout_.payload_bytes);
    }
    if (multilinear64(transfer.tensor, layout_.payload_bytes) != plan->sum(transfer.item)) {
      status = Status::ChecksumError;
      stats_.checksum_errors.fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (status == Status::Ok) {
    auto& bytes = plan->direction == Direction::Read ? stats_.bytes_read : stats_.bytes_written;
    auto& objects = plan->direction == Direction::Read ? stats_.objects_read : stats_.objects_written;
    bytes.fetch_add(layout_.object_bytes, std::memory_order_relaxed);
    objects.fetch_add(1, std::memory_order_relaxed);
  } else if (status != Status::ChecksumError && status != Status::Cancelled) {
    stats_.device_errors.fetch_add(1, std::memory_order_relaxed);
  }
  end_item(*transfer.iocb, *plan, transfer.item, transfer.status_slot, status);
}

}  // namespace tutti
