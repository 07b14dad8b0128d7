#include "ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "tutti/checksum.h"

namespace rig {

tutti::Layout Ring::layout(size_t drives, uint64_t area) {
  tutti::Layout layout;
  layout.objects = 7;
  layout.payload_bytes = kObjectBytes;
  layout.object_bytes = kObjectBytes;
  layout.slots = kObjects / 7;
  for (size_t i = 0; i < drives; ++i) {
    layout.data_offset.push_back(area + i * kBlock);  // the same object elsewhere on each drive
  }
  return layout;
}

Ring::Ring(const Context& context, const Shape& shape)
    : space(nvme::dma_space_for(context.driver)),
      accelerator(gio::make_host_accelerator()),
      shape_(shape),
      layout_(layout(shape.drives.size(), shape.area)),
      memory_bytes_((kObjects * kStride + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB)) {
  std::vector<std::unique_ptr<nvme::UserController>> controllers;
  for (size_t i = 0; i < shape.drives.size(); ++i) {
    nvme::ControllerOptions options;
    options.allow_sgl = shape.sgl[i];
    options.command_timeout = shape.admin_timeout;
    Session session = open_drive(context, shape.drives[i], options, space);
    CHECK((session.controller->pointer() == nvme::DataPointer::Sgl) == shape.sgl[i]);
    devices.push_back(session.device);
    controllers.push_back(std::move(session.controller));
  }
  drives = std::make_unique<gio::DriveController>(std::move(controllers), space, kIssuers);
  gio::QueueOptions options;
  options.depth = 4;
  options.blocks = 1;
  options.issuers_per_block = kIssuers;
  options.movers_per_block = 1;
  options.lanes = 8;
  options.pairs_per_issuer = drives->drives();
  options.pairs = drives->pairs();
  options.payload_bytes = shape.payload_bytes;
  options.object_bytes = kObjectBytes;
  options.bounce = shape.bounce;
  options.command_timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(shape.command_timeout).count());
  if (shape.deaf_pair) {
    options.pairs[*shape.deaf_pair].sq_doorbell = &unheard_;
  }
  queue = std::make_unique<gio::Queue>(*accelerator, options);
  if (shape.peer) {
    bar_ = std::make_unique<nvme::PeerBar>(context.peer, 2);
    memory_ = bar_->window().at;
  } else {
    const int huge = shape.bounce ? 0 : MAP_HUGETLB;
    void* const at = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | huge, -1, 0);
    CHECK(at != MAP_FAILED);
    memory_ = static_cast<uint8_t*>(at);
  }
  if (shape.bounce) {  // the drives know the slots and nothing of the engine's memory
    const auto [first, end] = queue->slot_memory();
    queue->register_slots(drives->map(reinterpret_cast<void*>(first), end - first));
  } else if (shape.peer) {
    queue->register_range(drives->map_peer({memory_, memory_bytes_, bar_->window().physical}));
  } else {
    queue->register_range(drives->map(memory_, memory_bytes_));
  }
  forget();
}

Ring::~Ring() {
  CHECK(accelerator->drain(20000));
  drives.reset();
  if (bar_ == nullptr) {
    munmap(memory_, memory_bytes_);
  }
}

void Ring::forget() { std::memset(memory_, 0xEE, kObjects * kStride); }

bool Ring::holds(uint32_t i) const { return matches(object(i), shape_.payload_bytes, salt(shape_.area, i), 0); }

uint32_t Ring::count(Status status) const {
  return static_cast<uint32_t>(std::count(statuses.begin(), statuses.end(), static_cast<uint8_t>(status)));
}

tutti::Iocb* Ring::give(Direction direction, uint32_t first, uint32_t count) {
  tutti::Iocb* iocb = queue->get_iocb();
  CHECK(iocb != nullptr);
  iocb->header.direction = direction;
  iocb->header.num_ioctx = static_cast<uint16_t>(count);
  for (uint32_t i = 0; i < count; ++i) {
    const auto place = address(first + i);
    iocb->contexts[i] = {reinterpret_cast<uint64_t>(object(first + i)),
                         shape_.payload_bytes,
                         place.offset / kBlock,
                         kObjectBytes / kBlock - 1,
                         static_cast<uint16_t>(place.device),
                         static_cast<uint16_t>(i)};
    queue->sums(iocb->header.id)[i] = sums[first + i];
    queue->statuses(iocb->header.id)[i] = 0;
  }
  iocb->header.first_item = first;
  queue->issue({&iocb, 1});
  return iocb;
}

void Ring::answer_quarantine() {
  for (const uint32_t pair : queue->quarantined()) {
    if (std::find(retired.begin(), retired.end(), pair) != retired.end()) {
      continue;  // with another of its drive
    }
    for (const uint32_t free : drives->abort(pair)) {
      queue->retire(free);
      retired.push_back(free);
    }
  }
}

tutti::Cqe Ring::wait(tutti::Iocb* iocb) {
  const uint32_t id = iocb->header.id;
  const auto until = within(25000);
  for (;;) {
    if (const auto cqe = queue->wait_cqe(id, std::chrono::milliseconds(5))) {
      const uint32_t contexts = iocb->header.num_ioctx;
      CHECK(cqe->contexts == contexts);
      statuses.assign(queue->statuses(id), queue->statuses(id) + contexts);
      if (iocb->header.direction == Direction::Write && cqe->status == 0) {
        std::copy_n(queue->sums(id), contexts, sums.begin() + static_cast<ptrdiff_t>(iocb->header.first_item));
      }
      queue->release(id);
      return *cqe;
    }
    answer_quarantine();
    CHECK(Clock::now() < until);
  }
}

void Ring::there_and_back() {
  for (uint32_t i = 0; i < kObjects; ++i) {
    fill(object(i), kObjectBytes, salt(shape_.area, i), 0);
  }
  CHECK(run(Direction::Write, 0, kObjects).status == 0);
  for (uint32_t i = 0; i < kObjects; ++i) {
    CHECK(sums[i] == tutti::multilinear64(object(i), shape_.payload_bytes));
  }
  forget();
  tutti::Iocb* const first = give(Direction::Read, 0, 10);  // two at once
  tutti::Iocb* const second = give(Direction::Read, 10, kObjects - 10);
  CHECK(wait(second).status == 0 && wait(first).status == 0);
  for (uint32_t i = 0; i < kObjects; ++i) {
    CHECK(holds(i) && all_equal(object(i) + shape_.payload_bytes, kStride - shape_.payload_bytes, 0xEE));
  }
  CHECK(retired.empty() && queue->working_pairs() == kIssuers * drives->drives());
}

void ring_by_kernel(const Context& context, const std::vector<std::string>& drives, uint64_t area,
                    uint32_t payload_bytes) {
  const tutti::Layout layout = Ring::layout(drives.size(), area);
  auto* const memory = static_cast<uint8_t*>(std::aligned_alloc(4096, kObjectBytes));
  for (uint32_t i = 0; i < kObjects; ++i) {
    const auto place = layout.address(i / 7, i / 7 % 2, i % 7);
    read_by_kernel(context.drive(drives[place.device]), memory, place.offset, kObjectBytes);
    CHECK(matches(memory, payload_bytes, Ring::salt(area, i), 0));
  }
  std::free(memory);
}

}  // namespace rig
