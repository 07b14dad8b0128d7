#include "tutti/gio/gio_executor.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "tutti/nvme/memory_controller.h"

namespace tutti::gio {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);   // looked at the completions without a pause
constexpr auto kPause = std::chrono::microseconds(10);  // between looks after that
constexpr auto kTick = std::chrono::milliseconds(5);    // how often deadlines and queue pairs are looked at
constexpr uint32_t kGpuPage = 64 << 10;                 // of a GPU's memory as PCI devices see it
constexpr uint32_t kMostEngines = 4;                    // of the controller model
constexpr uint32_t kHostPage = 4 << 10;
constexpr uint32_t kMostPairs = 8;          // of an issuing warp; more devices share one pair
constexpr uint32_t kLastResortMs = 10'000;  // for a kernel to end when the executor stops

}  // namespace

GioExecutor::GioExecutor(Layout layout, std::vector<DeviceFile> devices, GioOptions options, const SlotTable* table,
                         FaultInjector* faults)
    : Executor(std::move(layout), std::move(devices), table, faults), options_(std::move(options)) {}

GioExecutor::~GioExecutor() { stop(std::chrono::milliseconds(0)); }

void GioExecutor::start_workers() {
  accelerator_ = options_.cuda ? make_cuda_accelerator(options_.device, options_.stream) : make_host_accelerator();
  QueueOptions queue = options_.queue;
  queue.payload_bytes = static_cast<uint32_t>(layout_.payload_bytes);
  queue.object_bytes = static_cast<uint32_t>(layout_.object_bytes);
  for (const auto& file : devices_) {
    queue.logical_block_bytes = std::max(queue.logical_block_bytes, file.offset_align);
  }
  // A pair for each device: threads then serve one device each, and writers don't contend for one file's lock.
  queue.pairs_per_issuer = devices_.size() <= kMostPairs ? static_cast<uint32_t>(devices_.size()) : 1;
  queue.bounce = !options_.model;
  queue.pointer = options_.model ? options_.pointer : nvme::DataPointer::Sgl;
  const uint64_t issuers = uint64_t{queue.blocks} * queue.issuers_per_block;
  if (options_.drives) {
    use_drives(queue, static_cast<uint32_t>(issuers));
  }
  // Slots within the limit: fewer commands in flight per warp, down to one.
  if (queue.bounce) {
    queue.lanes = static_cast<uint32_t>(
        std::min<uint64_t>(queue.lanes, options_.pinned_bytes / (issuers * layout_.object_bytes)));
  }
  if (queue.lanes == 0) {
    throw std::runtime_error("pinned memory of " + std::to_string(options_.pinned_bytes) + " bytes is less than the " +
                             std::to_string(issuers * layout_.object_bytes) +
                             " that one object per issuing warp takes; raise the limit or lower the number of warps");
  }
  queue_ = std::make_unique<Queue>(*accelerator_, queue);
  running_.assign(queue_->depth(), nullptr);
  if (drives_ != nullptr) {
    map_for_drives();
  } else {
    options_.model ? start_model(queue) : start_files(queue);
  }
  driver_ = std::thread([this] { run(); });
}

void GioExecutor::use_drives(QueueOptions& queue, uint32_t issuers) {
  if (options_.cuda) {
    throw std::runtime_error("drives are driven by threads: their registers aren't mapped for a GPU yet");
  }
  drives_ = options_.drives(issuers);
  if (drives_->drives() != devices_.size()) {
    throw std::runtime_error(std::to_string(drives_->drives()) + " drives for a layout over " +
                             std::to_string(devices_.size()) + " devices");
  }
  queue.pairs = drives_->pairs();
  queue.pairs_per_issuer = drives_->drives();
  queue.logical_block_bytes = drives_->drive(0).name_space().block_bytes;
  // A drive writes whole objects, at addresses that are multiples of 4; where that would touch what isn't ours, and
  // where the engine's memory can't be described, data go through slots.
  const bool whole = layout_.payload_bytes == layout_.object_bytes;
  queue.bounce = !whole || std::any_of(regions().begin(), regions().end(), [](const TensorRegion& region) {
    return (region.base | region.stride) % 4 != 0;
  });
}

void GioExecutor::map_for_drives() {
  if (const auto [first, end] = queue_->slot_memory(); end != 0) {
    queue_->register_slots(drives_->map(reinterpret_cast<void*>(first), end - first));
    return;
  }
  constexpr uint64_t kPage = nvme::kBasePageBytes;
  for (const auto& [first, last] : ranges()) {
    const uint64_t base = first / kPage * kPage;
    const uint64_t bytes = (last - base + kPage - 1) / kPage * kPage;
    queue_->register_range(drives_->map(reinterpret_cast<void*>(base), bytes));
  }
}

void GioExecutor::start_files(const QueueOptions& queue) {
  FileControllerOptions files;
  for (const auto& file : devices_) {
    files.files.push_back(file.fd);
  }
  files.logical_block_bytes = queue.logical_block_bytes;
  files.threads = std::min<uint32_t>(options_.threads, static_cast<uint32_t>(queue_->served().size()));
  files.uring = options_.uring;
  files.depth = options_.depth;
  files.groups = queue.pairs_per_issuer;
  files.memory = queue_->slot_memory();
  controller_ = std::make_unique<FileController>(queue_->served(), files, faults_);
}

void GioExecutor::start_model(const QueueOptions& queue) {
  for (const auto& file : devices_) {
    const auto bytes = static_cast<size_t>(std::max<off_t>(lseek(file.fd, 0, SEEK_END), 0));
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
    const bool read_only = at == MAP_FAILED && errno == EACCES;
    if (read_only) {  // of a store that only serves
      at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd, 0);
    }
    if (at == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "mapping a device file for the controller model");
    }
    images_.emplace_back(static_cast<unsigned char*>(at), bytes);
    accelerator_->pin(at, bytes, read_only);
  }
  const uint32_t page = options_.cuda ? kGpuPage : kHostPage;
  for (const auto& [first, last] : ranges()) {
    const uint64_t base = first / page * page;
    std::vector<uint64_t> pages((last - base + page - 1) / page);
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = base + i * page;  // the model sees this process's own addresses
    }
    queue_->register_range(base, last - base, page, pages);
  }
  nvme::MemoryControllerOptions model;
  model.images = images_;
  model.logical_block_bytes = queue.logical_block_bytes;
  model.threads = std::min<uint32_t>({options_.threads, kMostEngines, static_cast<uint32_t>(queue_->served().size())});
  for (uint32_t i = 0; i < model.threads; ++i) {
    model.engines.push_back(accelerator_->copy_engine());
  }
  controller_ = std::make_unique<nvme::MemoryController>(queue_->served(), std::move(model), faults_);
}

void GioExecutor::join_workers() {
  if (driver_.joinable()) {
    driver_.join();
  }
  // The kernel first: nothing may be submitted to a controller that is gone.
  if (accelerator_ != nullptr && !accelerator_->drain(kLastResortMs)) {
    note("the I/O kernel did not end within 10 s");
  }
  controller_.reset();
  drives_.reset();  // before the memory that is mapped for them
  queue_.reset();
  accelerator_.reset();
  for (const auto& [at, bytes] : images_) {
    munmap(at, bytes);
  }
  images_.clear();
}

uint64_t GioExecutor::pinned_bytes() const noexcept { return queue_ == nullptr ? 0 : queue_->pinned_bytes(); }

uint64_t GioExecutor::mark(uint64_t stream) { return accelerator_->mark(stream); }
bool GioExecutor::reached(uint64_t ticket) { return ticket == 0 || accelerator_->reached(ticket); }

Iocb* GioExecutor::obtain() noexcept { return queue_->get_iocb(); }

uint32_t GioExecutor::contexts_per_iocb(const Plan& plan) const noexcept {
  // The first ones are small, so that the kernel begins while the rest is prepared; a layer of a long prefix is one.
  const uint64_t ramp = std::max<uint64_t>(64, plan.next_item);
  return static_cast<uint32_t>(std::min<uint64_t>({ramp, std::max<uint32_t>(plan.blocks(), 64), kIoctxPerIocb}));
}

void GioExecutor::issue(Iocb& iocb, Plan& plan) noexcept {
  const uint32_t id = iocb.header.id;
  running_[id] = &iocb;
  if (plan.direction == Direction::Read) {
    uint64_t* sums = queue_->sums(id);
    for (uint32_t i = 0; i < iocb.header.num_ioctx; ++i) {
      sums[i] = plan.sum(plan.item(iocb.header.first_item + i));
    }
  }
  if (!broken_) {
    Iocb* const one = &iocb;
    queue_->issue({&one, 1});
  }
}

void GioExecutor::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // pauses of microseconds, not of the default 50 more
  auto next_look = Clock::now() + kTick;
  auto last_work = Clock::now();
  for (;;) {
    const uint64_t seen = epoch();
    feed();
    const bool any = take_completions();
    const auto now = Clock::now();
    if (now >= next_look) {
      next_look = now + kTick;
      expire_plans();
      cancel_ended();
      answer_quarantine();
      if (const std::string why = accelerator_->failure(); !why.empty()) {
        fail_all(why);
        return;
      }
    }
    if (queue_->outstanding() == 0 && !any) {
      if (stopping()) {
        return;
      }
      if (controller_ != nullptr) {
        controller_->awake(false);
      }
      expire_plans();
      wait_for_work(seen);
      last_work = Clock::now();
      continue;
    }
    if (controller_ != nullptr) {
      controller_->awake(true);
    }
    queue_->kick();
    if (any) {
      last_work = now;
    } else if (now - last_work > kSpin) {
      std::this_thread::sleep_for(kPause);
    }
  }
}

bool GioExecutor::take_completions() {
  bool any = false;
  while (const auto cqe = queue_->reap()) {
    any = true;
    end_iocb(cqe->iocb, &*cqe);
  }
  return any;
}

void GioExecutor::end_iocb(uint32_t id, const Cqe* cqe) {
  Iocb& iocb = *running_[id];
  auto* plan = reinterpret_cast<Plan*>(iocb.header.plan);
  const auto keep = plan->shared_from_this();  // the last item's end lets the others forget the plan
  const uint32_t contexts = iocb.header.num_ioctx;
  const uint64_t first = iocb.header.first_item;
  uint8_t* statuses = queue_->statuses(id);
  const uint64_t* sums = queue_->sums(id);
  for (uint32_t i = 0; i < contexts; ++i) {
    const Item item = plan->item(first + i);
    Status status = Status::DeviceError;
    if (cqe != nullptr) {
      status = cqe->status == 0 ? Status::Ok : static_cast<Status>(statuses[i]);
      statuses[i] = 0;
      if (plan->direction == Direction::Write && status == Status::Ok) {
        plan->sum(item) = sums[i];
      }
    }
    count(plan->direction, status);
    plan->object_done(item, status);
  }
  running_[id] = nullptr;
  queue_->release(id);
}

void GioExecutor::cancel_ended() {
  for (Iocb* iocb : running_) {
    if (iocb != nullptr && reinterpret_cast<Plan*>(iocb->header.plan)->ended_early()) {
      store_release(&iocb->header.cancelled, 1);
    }
  }
}

// A command has outlasted its time: its queue is given up, and its plan may end once nothing of it touches memory.
void GioExecutor::answer_quarantine() {
  for (const uint32_t pair : queue_->quarantined()) {
    if (drives_ != nullptr) {
      try {
        for (const uint32_t free : drives_->abort(pair)) {
          queue_->retire(free);
        }
      } catch (const std::runtime_error& error) {  // the memory isn't free: it stays with its plan
        note(std::string("a drive can't be stopped: ") + error.what());
        continue;
      }
    } else {
      controller_->abort(pair);
      queue_->retire(pair);
    }
    note("a device command outlasted its time: " + std::to_string(queue_->working_pairs()) + " of " +
         std::to_string(queue_->pairs()) + " queue pairs are left");
  }
}

// The GPU can't touch anything any more: what it had ends here.
void GioExecutor::fail_all(const std::string& why) {
  note("the GPU failed: " + why);
  broken_ = true;
  for (;;) {
    for (uint32_t id = 0; id < running_.size(); ++id) {
      if (running_[id] != nullptr) {
        end_iocb(id, nullptr);
      }
    }
    const uint64_t seen = epoch();
    feed();
    if (std::none_of(running_.begin(), running_.end(), [](const Iocb* iocb) { return iocb != nullptr; })) {
      if (stopping()) {
        return;
      }
      wait_for_work(seen);
    }
  }
}

}  // namespace tutti::gio
