// The rings and the I/O kernel's source, on threads, against the controller model: every way in which a command can
// end.
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "tutti/checksum.h"
#include "tutti/gio/queue.h"
#include "tutti/nvme/memory_controller.h"

using namespace tutti;
using namespace std::chrono_literals;
using nvme::ModelFault;
using nvme::ModelFaultKind;

namespace {

constexpr uint32_t kPayload = 8192;
constexpr uint32_t kBlocks = 96;

struct Rig {
  std::vector<unsigned char> images[2];
  std::vector<unsigned char> memory;
  std::unique_ptr<gio::Accelerator> accelerator = gio::make_host_accelerator();
  std::unique_ptr<gio::Queue> queue;
  std::unique_ptr<nvme::MemoryController> model;

  explicit Rig(uint64_t timeout_ns = 20'000'000'000, uint32_t depth = 4, uint64_t largest = 0,
               nvme::DataPointer pointer = nvme::DataPointer::Sgl)
      : memory(kBlocks * kPayload + 65536) {
    for (auto& image : images) {
      image.resize(kBlocks * kPayload);
    }
    gio::QueueOptions options;
    options.depth = depth;
    options.blocks = 1;
    options.issuers_per_block = 2;
    options.movers_per_block = 1;
    options.lanes = 8;
    options.pairs_per_issuer = 2;
    options.payload_bytes = kPayload;
    options.object_bytes = kPayload;
    options.bounce = false;
    options.pointer = pointer;
    options.command_timeout_ns = timeout_ns;
    queue = std::make_unique<gio::Queue>(*accelerator, options);
    const uint64_t base = reinterpret_cast<uint64_t>(memory.data()) / 4096 * 4096;
    const uint64_t bytes = reinterpret_cast<uint64_t>(memory.data()) + memory.size() - base;
    std::vector<uint64_t> pages((bytes + 4095) / 4096);
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = base + i * 4096;
    }
    queue->register_range(base, bytes, 4096, pages);
    nvme::MemoryControllerOptions model_options;
    for (auto& image : images) {
      model_options.images.emplace_back(image.data(), image.size());
    }
    model_options.threads = 2;
    model_options.largest_transfer = largest;
    model = std::make_unique<nvme::MemoryController>(queue->served(), std::move(model_options), nullptr);
    model->awake(true);
    testing::Random random(7);
    for (size_t i = 0; i + 8 <= memory.size(); i += 8) {
      const uint64_t word = random.next();
      std::memcpy(memory.data() + i, &word, 8);
    }
  }
  ~Rig() {
    CHECK(accelerator->drain(20'000));
    model.reset();
  }

  unsigned char* block(uint32_t i) { return memory.data() + 64 + size_t{i} * kPayload; }

  // Contexts for blocks [first, first + count): two devices in turn.
  Iocb* fill(Direction direction, uint32_t first, uint32_t count) {
    Iocb* iocb = queue->get_iocb();
    if (iocb == nullptr) {
      return nullptr;
    }
    iocb->header.direction = direction;
    iocb->header.num_ioctx = static_cast<uint16_t>(count);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t b = first + i;
      iocb->contexts[i] = {reinterpret_cast<uint64_t>(block(b)), kPayload,
                           uint64_t{b / 2} * kPayload / 512,     kPayload / 512 - 1,
                           static_cast<uint16_t>(b % 2),         static_cast<uint16_t>(i)};
      queue->sums(iocb->header.id)[i] = sum_of(b);
      queue->statuses(iocb->header.id)[i] = 0;
    }
    return iocb;
  }
  uint64_t sum_of(uint32_t b) const { return b < sums.size() ? sums[b] : 0; }
  std::vector<uint64_t> sums;

  Cqe wait(Iocb* iocb) {
    const auto until = std::chrono::steady_clock::now() + 30s;
    for (;;) {
      if (const auto cqe = queue->wait_cqe(iocb->header.id, 10ms)) {
        return *cqe;
      }
      for (const uint32_t pair : queue->quarantined()) {
        model->abort(pair);
        queue->retire(pair);
      }
      CHECK(std::chrono::steady_clock::now() < until);
    }
  }
  Cqe run(Direction direction, uint32_t first, uint32_t count) {
    Iocb* iocb = fill(direction, first, count);
    CHECK(iocb != nullptr);
    queue->issue({&iocb, 1});
    const Cqe cqe = wait(iocb);
    last = *iocb;
    last_statuses.assign(queue->statuses(iocb->header.id), queue->statuses(iocb->header.id) + count);
    last_sums.assign(queue->sums(iocb->header.id), queue->sums(iocb->header.id) + count);
    queue->release(iocb->header.id);
    return cqe;
  }
  void store_all() {
    const Cqe cqe = run(Direction::Write, 0, kBlocks);
    CHECK(cqe.status == 0 && cqe.contexts == kBlocks);
    sums = last_sums;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      CHECK(sums[b] == multilinear64(block(b), kPayload));
      CHECK(std::memcmp(images[b % 2].data() + size_t{b / 2} * kPayload, block(b), kPayload) == 0);
    }
  }
  uint32_t failed(Status status) const {
    uint32_t count = 0;
    for (const uint8_t found : last_statuses) {
      CHECK(found == 0 || static_cast<Status>(found) == status);
      count += found == 0 ? 0 : 1;
    }
    return count;
  }
  Iocb last{};
  std::vector<uint8_t> last_statuses;
  std::vector<uint64_t> last_sums;
};

void what_is_stored_comes_back(nvme::DataPointer pointer) {
  Rig rig(20'000'000'000, 4, 0, pointer);
  rig.store_all();
  const std::vector<unsigned char> before = rig.memory;
  for (uint32_t b = 0; b < kBlocks; ++b) {
    std::memset(rig.block(b), 0xEE, kPayload);
  }
  CHECK(rig.run(Direction::Read, 0, kBlocks).status == 0);
  CHECK(std::memcmp(rig.block(0), before.data() + 64, size_t{kBlocks} * kPayload) == 0);
  // Damage on the medium is noticed, for that object alone.
  rig.images[1][5 * kPayload + 77] ^= 1;
  const Cqe cqe = rig.run(Direction::Read, 0, kBlocks);
  CHECK(cqe.status == static_cast<uint32_t>(Status::ChecksumError) && rig.failed(Status::ChecksumError) == 1);
  CHECK(rig.last_statuses[11] != 0);
}

void every_status_class_has_its_status() {
  Rig rig;
  rig.store_all();
  const std::pair<uint16_t, Status> cases[] = {
      {nvme::kInvalidField, Status::DeviceError},      {nvme::kDataTransferError, Status::DeviceError},
      {nvme::kInternalError, Status::DeviceError},     {nvme::kAbortRequested, Status::Cancelled},
      {nvme::kLbaOutOfRange, Status::DeviceError},     {nvme::kCapacityExceeded, Status::NoSpace},
      {nvme::kNamespaceNotReady, Status::Retry},       {0x109, Status::DeviceError},
      {nvme::kWriteFault, Status::DeviceError},        {nvme::kUnrecoveredReadError, Status::DeviceError},
      {nvme::kGuardCheckError, Status::ChecksumError}, {nvme::kAccessDenied, Status::DeviceError},
      {nvme::kInternalPathError, Status::DeviceError}, {0x7F0, Status::DeviceError}};
  for (const auto& [code, status] : cases) {
    rig.model->add_fault({ModelFaultKind::Code, 9, 3, code});
    const Cqe cqe = rig.run(Direction::Read, 0, kBlocks);
    CHECK(cqe.status == static_cast<uint32_t>(status) && rig.failed(status) == 3);
    rig.model->clear_faults();
    CHECK(rig.run(Direction::Read, 0, kBlocks).status == 0);
  }
}

void order_and_delay_change_nothing() {
  Rig rig;
  rig.store_all();
  rig.model->add_fault({ModelFaultKind::Reorder, 3, UINT64_MAX, 0, 0, 5});
  rig.model->add_fault({ModelFaultKind::Delay, 10, UINT64_MAX, 0, 2'000'000});
  for (int round = 0; round < 5; ++round) {
    CHECK(rig.run(Direction::Read, 0, kBlocks).status == 0);
  }
}

void a_lost_completion_costs_its_queue_pair_and_no_more() {
  Rig rig(700'000'000);  // long enough for a thread that gets no processor for a while
  rig.store_all();
  rig.model->add_fault({ModelFaultKind::Lose, 20, 1});
  const Cqe cqe = rig.run(Direction::Read, 0, kBlocks);
  CHECK(cqe.status == static_cast<uint32_t>(Status::Timeout));
  // What was in flight on that pair when it was given up; no other status.
  CHECK(rig.failed(Status::Timeout) >= 1 && rig.failed(Status::Timeout) <= 8);
  CHECK(rig.queue->working_pairs() == 3);
  rig.model->clear_faults();
  CHECK(rig.run(Direction::Read, 0, kBlocks).status == 0);  // the other warp does the work
  // The last pairs go: nothing hangs, everything ends as an error.
  rig.model->add_fault({ModelFaultKind::Lose, 1, UINT64_MAX});
  const Cqe lost = rig.run(Direction::Read, 0, kBlocks);
  CHECK(lost.status != 0 && lost.contexts == kBlocks && rig.queue->working_pairs() <= 2);
  const Cqe after = rig.run(Direction::Read, 0, kBlocks);
  CHECK(after.status == static_cast<uint32_t>(Status::DeviceError) && rig.failed(Status::DeviceError) == kBlocks);
}

void a_full_ring_says_so_and_generations_grow() {
  Rig rig;
  rig.store_all();
  std::vector<Iocb*> filled;
  while (Iocb* iocb = rig.fill(Direction::Read, 0, 40)) {
    filled.push_back(iocb);
  }
  CHECK(filled.size() == 4);
  const uint32_t launches = rig.queue->launches();
  rig.queue->issue(filled);  // several with one launch
  CHECK(rig.queue->launches() <= launches + 1);
  for (auto at = filled.rbegin(); at != filled.rend(); ++at) {  // waited for in another order than they were given
    const Cqe cqe = rig.wait(*at);
    CHECK(cqe.status == 0 && cqe.contexts == 40 && cqe.generation == (*at)->header.generation);
    const uint32_t generation = (*at)->header.generation;
    rig.queue->release((*at)->header.id);
    CHECK((*at)->header.generation == generation + 1);
  }
  CHECK(rig.queue->get_iocb() != nullptr);
}

void what_a_controller_can_not_do_is_refused() {
  Rig small(20'000'000'000, 4, 4096);
  CHECK(small.run(Direction::Write, 0, 8).status == static_cast<uint32_t>(Status::DeviceError));  // beyond MDTS
  CHECK(small.failed(Status::DeviceError) == 8);
  Rig rig;
  Iocb* iocb = rig.fill(Direction::Read, 0, 2);
  iocb->contexts[1].lba = uint64_t{1} << 40;
  rig.queue->issue({&iocb, 1});
  CHECK(rig.wait(iocb).status != 0);
  CHECK(rig.queue->statuses(iocb->header.id)[1] == static_cast<uint8_t>(Status::DeviceError));
  rig.queue->release(iocb->header.id);
}

void cancelled_contexts_do_nothing() {
  Rig rig;
  rig.store_all();
  Iocb* iocb = rig.fill(Direction::Write, 0, 32);
  iocb->header.cancelled = 1;
  const uint64_t commands = rig.model->commands();
  rig.queue->issue({&iocb, 1});
  CHECK(rig.wait(iocb).status == static_cast<uint32_t>(Status::Cancelled) && rig.model->commands() == commands);
}

// An idle warp that left while another still worked would come back only with the next kernel.
void idle_warps_stay_while_others_work() {
  Rig rig;
  rig.store_all();
  rig.model->add_fault({ModelFaultKind::Delay, 1, UINT64_MAX, 0, 400'000'000});
  Iocb* first = rig.fill(Direction::Read, 0, 1);
  rig.queue->issue({&first, 1});
  const auto until = std::chrono::steady_clock::now() + 100ms;  // far longer than idle warps linger
  while (std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  Iocb* second = rig.fill(Direction::Read, 1, 40);
  rig.queue->issue({&second, 1});
  CHECK(rig.wait(first).status == 0 && rig.wait(second).status == 0);
  CHECK(rig.model->most_in_flight() > 8);  // of one warp
}

void doorbells_outside_a_queue_are_ignored() {
  std::vector<nvme::SubmissionEntry> sq(8);
  std::vector<nvme::CompletionEntry> cq(8);
  uint32_t sq_doorbell = 8;
  uint32_t cq_doorbell = 0;
  nvme::QueueServer server;
  server.add({sq.data(), cq.data(), &sq_doorbell, &cq_doorbell, 8});
  nvme::ServedCommand command;
  CHECK(!server.fetch(command) && server.bad_doorbells() == 1);
  sq_doorbell = 7;
  for (int i = 0; i < 7; ++i) {
    CHECK(server.fetch(command) && server.complete(0, static_cast<uint16_t>(i), 0));
  }
  CHECK(!server.fetch(command) && !server.complete(0, 9, 0));  // the completion queue is full
  cq_doorbell = 3;
  CHECK(server.complete(0, 9, 0) && nvme::phase_of(cq[7]) == 1);
  CHECK(server.complete(0, 10, 0) && nvme::phase_of(cq[0]) == 0);  // the phase turned with the queue
}

}  // namespace

int main() {
  what_is_stored_comes_back(nvme::DataPointer::Sgl);
  what_is_stored_comes_back(nvme::DataPointer::Prp);
  every_status_class_has_its_status();
  order_and_delay_change_nothing();
  a_lost_completion_costs_its_queue_pair_and_no_more();
  a_full_ring_says_so_and_generations_grow();
  what_a_controller_can_not_do_is_refused();
  cancelled_contexts_do_nothing();
  idle_warps_stay_while_others_work();
  doorbells_outside_a_queue_are_ignored();
  return 0;
}
