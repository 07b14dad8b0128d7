#include "tutti/lane_executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <future>
#include <system_error>

#include "tutti/checksum.h"

namespace tutti {
namespace {

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

LaneExecutor::LaneExecutor(Layout layout, std::vector<DeviceFile> devices, LaneOptions options, const SlotTable* table,
                           FaultInjector* faults)
    : Executor(std::move(layout), std::move(devices), table, faults),
      options_(options),
      ring_(std::max<uint32_t>(options.iocbs, 2)) {}

LaneExecutor::~LaneExecutor() { stop(std::chrono::milliseconds(0)); }

bool LaneExecutor::direct_possible(const TensorRegion& region, const DeviceFile& device) const noexcept {
  const auto aligned = [](uint64_t value, uint64_t to) { return to <= 1 || value % to == 0; };
  return layout_.payload_bytes == layout_.object_bytes && aligned(layout_.object_bytes, device.offset_align) &&
         aligned(region.base, device.memory_align) && aligned(region.stride, device.memory_align);
}

void LaneExecutor::start_workers() {
  for (const auto& [first, last] : ranges()) {
    ask_for_huge_pages(first, last);
  }
  staged_.assign(static_cast<size_t>(layout_.objects) * devices_.size(), 0);
  for (uint32_t object = 0; object < layout_.objects; ++object) {
    for (uint32_t device = 0; device < devices_.size(); ++device) {
      staged_[object * devices_.size() + device] = direct_possible(regions()[object], devices_[device]) ? 0 : 1;
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
    std::rethrow_exception(failure);
  }
}

void LaneExecutor::join_workers() {
  for (auto& lane : lanes_) {
    lane.join();
  }
  lanes_.clear();
}

Iocb* LaneExecutor::obtain() noexcept {
  while (ring_.reap()) {
  }
  return ring_.get_iocb();
}

void LaneExecutor::issue(Iocb& iocb, Plan& /*plan*/) noexcept {
  ring_.issue(iocb);
  announce();
}

uint32_t LaneExecutor::contexts_per_iocb(const Plan& plan) const noexcept {
  // Small enough that the lanes come to the end of each layer at about the same time.
  const uint64_t share = plan.blocks() / (uint64_t{4} * options_.lanes);
  return static_cast<uint32_t>(std::clamp<uint64_t>(share, 8, 256));
}

Iocb* LaneExecutor::next_iocb() {
  if (Iocb* iocb = ring_.take(); iocb != nullptr) {
    return iocb;
  }
  feed();
  return ring_.take();
}

void LaneExecutor::hang_until_released() {
  const uint64_t before = faults_->releases();
  while (faults_->releases() == before && !stopping()) {
    expire_plans();
    wait_for_work(epoch());
  }
}

// --- one object ---

void LaneExecutor::end_item(Iocb& iocb, Plan& plan, Item item, uint16_t status_slot, Status status) noexcept {
  const auto keep = plan.shared_from_this();  // the last item's end lets the others forget the plan
  ring_.complete(iocb, status_slot, status);
  plan.object_done(item, status);
}

bool LaneExecutor::begin(Iocb& iocb, uint16_t index, unsigned char* staging, Transfer& transfer) {
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

void LaneExecutor::finish(Transfer& transfer, int64_t result) {
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
    }
  }
  count(plan->direction, status);
  end_item(*transfer.iocb, *plan, transfer.item, transfer.status_slot, status);
}

}  // namespace tutti
