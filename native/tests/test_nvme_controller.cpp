// The controller and the issuer against a controller in software: life cycle, queues, faults; no PCI, no root.
#include <cstring>
#include <memory>
#include <string>

#include "check.h"
#include "nvme_model.h"
#include "tutti/nvme/queue_issuer.h"
#include "tutti/nvme/user_controller.h"

namespace nvme = tutti::nvme;
using tutti::Status;
using tutti::testing::ModelController;
using Clock = std::chrono::steady_clock;

namespace {

constexpr uint64_t kBlocks = 4096;  // 2 MiB

struct Rig {
  std::shared_ptr<ModelController> model = std::make_shared<ModelController>(kBlocks);
  std::shared_ptr<nvme::DmaSpace> space = nvme::DmaSpace::identity();
  std::unique_ptr<nvme::UserController> controller;
  nvme::DmaMemory memory = space->allocate(1 << 20, nvme::PageKind::Base4K);
  nvme::MemoryTable table{space, memory.region(), 65536};

  static nvme::ControllerOptions options() {
    nvme::ControllerOptions made;
    made.pages = nvme::PageKind::Base4K;
    made.command_timeout = std::chrono::milliseconds(300);
    return made;
  }
  void start(nvme::ControllerOptions made = options()) {
    controller = std::make_unique<nvme::UserController>(model, space, made);
  }
  nvme::Command command(uint8_t opcode, uint64_t lba, uint32_t blocks, uint64_t offset) const {
    return {opcode, lba, blocks, &table.range(), table.range().base + offset};
  }
};

Clock::time_point soon(int ms = 5000) { return Clock::now() + std::chrono::milliseconds(ms); }

template <typename Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void what_it_says_of_itself() {
  Rig rig;
  rig.start();
  const auto& controller = *rig.controller;
  CHECK(controller.serial() == "MODEL-1" && controller.model() == "software controller");
  CHECK(controller.identity().largest_transfer == 128 << 10 && controller.name_space().blocks == kBlocks);
  CHECK(controller.queue_pairs() == 4 && controller.volatile_cache());
  CHECK(controller.pointer() == nvme::DataPointer::Sgl && controller.no_sgl_reason().empty());
  CHECK(controller.health() == nvme::Health::Ready && rig.model->bus_master());
  rig.controller.reset();
  CHECK(rig.model->shut_down_in_order() && !rig.model->bus_master() && rig.model->dma_while_off() == 0);
}

// Every size and alignment, both ways of describing, compared with the model's own bytes.
void transfers(bool sgl) {
  Rig rig;
  auto options = Rig::options();
  options.allow_sgl = sgl;
  rig.start(options);
  CHECK((rig.controller->pointer() == nvme::DataPointer::Sgl) == sgl);
  nvme::QueueIssuer issuer(rig.controller->create_queue_pair(16));
  CHECK(issuer.pair().largest_transfer == 128 << 10);
  nvme::CommandResult result;
  for (const uint32_t blocks : {1U, 2U, 7U, 8U, 9U, 16U, 128U, 129U, 255U, 256U}) {
    for (const uint64_t offset : {0ULL, 512ULL, 4096ULL - 512, 65536ULL - 512, 65536ULL, 131072ULL + 1024}) {
      std::memset(rig.memory.at(), 0xEE, rig.memory.bytes());
      const auto read = rig.command(nvme::kOpRead, 100, blocks, offset);
      CHECK(issuer.run(&read, &result, 1, soon()) == Status::Ok);
      CHECK(std::memcmp(rig.memory.at() + offset, rig.model->data().data() + 51200, blocks * 512) == 0);
      CHECK(offset == 0 || rig.memory.at()[offset - 1] == 0xEE);
      CHECK(rig.memory.at()[offset + blocks * 512] == 0xEE);
      const auto write = rig.command(nvme::kOpWrite, 2000, blocks, offset);
      CHECK(issuer.run(&write, &result, 1, soon()) == Status::Ok);
      CHECK(std::memcmp(rig.model->data().data() + 51200, rig.model->data().data() + 1024000, blocks * 512) == 0);
    }
  }
  const nvme::Command flush{nvme::kOpFlush, 0, 0, nullptr, 0};
  CHECK(issuer.run(&flush, &result, 1, soon()) == Status::Ok);
}

void refused_before_the_device_sees_it() {
  Rig rig;
  rig.start();
  nvme::QueueIssuer issuer(rig.controller->create_queue_pair(4));
  CHECK(issuer.push(rig.command(nvme::kOpRead, 0, 0, 0), 0) == Status::BadState);                // nothing
  CHECK(issuer.push(rig.command(nvme::kOpRead, 0, 257, 0), 0) == Status::BadState);              // more than MDTS
  CHECK(issuer.push(rig.command(nvme::kOpRead, 0, 1, 2), 0) == Status::BadState);                // alignment
  CHECK(issuer.push(rig.command(nvme::kOpRead, 0, 8, (1 << 20) - 512), 0) == Status::BadState);  // past the memory
  CHECK(issuer.push(rig.command(0x7F, 0, 1, 0), 0) == Status::BadState);                         // another opcode
  CHECK(issuer.in_flight() == 0 && !issuer.quarantined());
}

void full_queue_and_one_doorbell_per_batch() {
  Rig rig;
  rig.start();
  nvme::QueueIssuer issuer(rig.controller->create_queue_pair(8));
  for (int round = 0; round < 9; ++round) {  // the queue wraps and the phase turns
    for (uint64_t i = 0; i < 7; ++i) {
      CHECK(issuer.push(rig.command(nvme::kOpRead, i, 1, i * 512), i) == Status::Ok);
    }
    CHECK(issuer.push(rig.command(nvme::kOpRead, 0, 1, 0), 7) == Status::Retry && issuer.in_flight() == 7);
    const uint64_t bells = issuer.doorbells();
    issuer.submit();
    issuer.submit();
    CHECK(issuer.doorbells() == bells + 1);
    uint64_t seen = 0;
    for (uint32_t ended = 0; ended < 7;) {
      std::array<nvme::Completed, 3> some{};
      const uint32_t found = issuer.poll(some.data(), 3);
      for (uint32_t i = 0; i < found; ++i) {
        CHECK(some[i].result.status == Status::Ok);
        seen |= 1ULL << some[i].tag;
      }
      ended += found;
    }
    CHECK(seen == 0x7F && issuer.in_flight() == 0);
  }
  std::vector<nvme::Command> many;
  for (uint64_t i = 0; i < 100; ++i) {
    many.push_back(rig.command(nvme::kOpRead, i, 1, i * 512));
  }
  std::vector<nvme::CommandResult> results(many.size());
  CHECK(issuer.run(many.data(), results.data(), 100, soon()) == Status::Ok);
  CHECK(std::memcmp(rig.memory.at(), rig.model->data().data(), 51200) == 0);
}

void one_command_fails_alone() {
  Rig rig;
  rig.start();
  rig.model->switches.bad_lba = 13;
  nvme::QueueIssuer issuer(rig.controller->create_queue_pair(16));
  std::vector<nvme::Command> commands;
  for (uint64_t i = 0; i < 10; ++i) {
    commands.push_back(rig.command(nvme::kOpRead, 2 * i, 2, i * 1024));
  }
  commands.push_back(rig.command(nvme::kOpRead, kBlocks - 1, 2, 65536));
  std::vector<nvme::CommandResult> results(commands.size());
  const auto count = static_cast<uint32_t>(commands.size());
  CHECK(issuer.run(commands.data(), results.data(), count, soon()) == Status::DeviceError);
  for (uint64_t i = 0; i < 10; ++i) {
    CHECK(results[i].status == (i == 6 ? Status::DeviceError : Status::Ok));
  }
  CHECK(results[6].code == nvme::kUnrecoveredReadError && results[10].code == nvme::kLbaOutOfRange);
  CHECK(!issuer.quarantined());
}

void timeout_quarantines_until_reset() {
  Rig rig;
  rig.start();
  nvme::QueueIssuer issuer(rig.controller->create_queue_pair(8));
  rig.model->switches.hold_io = true;
  std::vector<nvme::Command> commands(10, rig.command(nvme::kOpRead, 0, 1, 0));
  std::vector<nvme::CommandResult> results(10);
  CHECK(issuer.run(commands.data(), results.data(), 10, soon(30)) == Status::Timeout);
  for (int i = 0; i < 10; ++i) {
    CHECK(results[static_cast<size_t>(i)].status == (i < 7 ? Status::Timeout : Status::Cancelled));
  }
  CHECK(issuer.quarantined() && issuer.in_flight() == 7);
  CHECK(issuer.push(commands[0], 0) == Status::BadState);
  CHECK(issuer.run(commands.data(), results.data(), 1, soon()) == Status::BadState);
  rig.controller->stop();
  CHECK(rig.controller->health() == nvme::Health::Stopped && !rig.model->bus_master());
  rig.model->switches.hold_io = false;
  rig.controller->start();
  nvme::QueueIssuer again(rig.controller->create_queue_pair(8));
  CHECK(again.run(commands.data(), results.data(), 10, soon()) == Status::Ok);
}

void an_answer_nobody_asked_for() {
  Rig rig;
  rig.start();
  nvme::QueueIssuer issuer(rig.controller->create_queue_pair(8));
  rig.model->switches.wrong_identifier = true;
  const auto read = rig.command(nvme::kOpRead, 0, 1, 0);
  nvme::CommandResult result;
  CHECK(issuer.run(&read, &result, 1, soon()) == Status::Timeout && issuer.quarantined());
}

void sgl_only_where_it_works() {
  {
    Rig rig;
    rig.model->switches.sgls = 0;
    rig.start();
    CHECK(rig.controller->pointer() == nvme::DataPointer::Prp && contains(rig.controller->no_sgl_reason(), "SGLS 0"));
  }
  {
    Rig rig;
    rig.model->switches.sgl_gives_other_bytes = true;
    rig.start();
    CHECK(rig.controller->pointer() == nvme::DataPointer::Prp);
    CHECK(contains(rig.controller->no_sgl_reason(), "other bytes"));
  }
  {
    Rig rig;
    rig.model->switches.refuses_sgl = true;
    rig.start();
    CHECK(rig.controller->pointer() == nvme::DataPointer::Prp);
    CHECK(contains(rig.controller->no_sgl_reason(), "0x2"));
  }
  {
    Rig rig;
    rig.model->switches.bad_lba = 0;
    rig.start();
    CHECK(contains(rig.controller->no_sgl_reason(), "0x281"));
  }
}

void starts_that_fail() {
  {
    Rig rig;
    rig.model->switches.never_ready = true;
    CHECK(contains(message_of([&] { rig.start(); }), "CSTS.RDY didn't become 1 within"));
    CHECK(!rig.model->bus_master());
  }
  {
    Rig rig;
    rig.model->switches.fatal_on_enable = true;
    CHECK(contains(message_of([&] { rig.start(); }), "fatal status while starting"));
  }
  {
    Rig rig;
    rig.model->switches.mute_admin = true;
    CHECK(contains(message_of([&] { rig.start(); }), "Identify Controller: no answer within 300 ms"));
    CHECK(!rig.model->bus_master());
  }
  {
    Rig rig;
    auto options = Rig::options();
    options.nsid = 2;
    CHECK(contains(message_of([&] { rig.start(options); }), "namespace 2 of 1"));
  }
}

void fatal_while_running() {
  Rig rig;
  rig.start();
  rig.model->break_fatally();
  while (rig.controller->health() != nvme::Health::Fatal) {
    std::this_thread::yield();
  }
  CHECK(contains(message_of([&] { rig.controller->create_queue_pair(8); }), "fatal status"));
}

void a_controller_that_does_not_stop_is_reset_from_outside() {
  Rig rig;
  rig.start();
  rig.model->switches.never_stops = true;
  rig.controller->stop();
  CHECK(rig.model->function_resets() == 1 && !rig.model->bus_master());
  rig.controller->start();
  CHECK(rig.controller->health() == nvme::Health::Ready);
}

void queue_pairs() {
  Rig rig;
  rig.start();
  auto& controller = *rig.controller;
  for (uint16_t i = 1; i <= 4; ++i) {
    CHECK(controller.create_queue_pair(8).id == i);
  }
  CHECK(contains(message_of([&] { controller.create_queue_pair(8); }), "all 4 queue pairs"));
  controller.delete_queue_pair(2);
  CHECK(controller.create_queue_pair(8).id == 2);
  CHECK(contains(message_of([&] { controller.delete_queue_pair(9); }), "no queue pair 9"));
  CHECK(contains(message_of([&] { controller.create_queue_pair(65); }), "2 to 64 entries"));
  CHECK(contains(message_of([&] { controller.create_queue_pair(1); }), "2 to 64 entries"));
  // Whoever still polls a pair that was deleted, or whose controller was stopped, reads memory that is there.
  controller.delete_queue_pair(3);
  const nvme::QueuePair deleted = controller.create_queue_pair(8);
  const nvme::DmaMemory kept = controller.delete_queue_pair(deleted.id);
  CHECK(kept.at() == reinterpret_cast<uint8_t*>(deleted.sq) && deleted.cq[7].status == 0);
  const nvme::QueuePair reset = controller.create_queue_pair(8);
  controller.stop();
  CHECK(reset.cq[7].status == 0);
  CHECK(contains(message_of([&] { controller.delete_queue_pair(reset.id); }), "is stopped"));
}

void memory_and_tables() {
  const auto space = nvme::DmaSpace::identity();
  auto memory = space->allocate(5000, nvme::PageKind::Base4K);
  CHECK(memory.bytes() == 8192 && memory.region().contiguous(0, 8192) && !memory.region().contiguous(1, 8192));
  CHECK(contains(message_of([&] { space->map(memory.at() + 1, 4096); }), "multiples of 4096"));
  CHECK(contains(message_of([&] { nvme::MemoryTable(space, memory.region(), 65536); }), "divides the memory"));
  const nvme::DmaMemory moved = std::move(memory);
  CHECK(moved.bytes() == 8192);
  nvme::DmaRegion scattered{moved.at(), 8192, 4096, {0x10000, 0x30000}};
  CHECK(!scattered.contiguous(0, 8192) && scattered.contiguous(4096, 4096) && scattered.device(4097) == 0x30001);
  CHECK(contains(message_of([&] { nvme::MemoryTable(space, scattered, 8192); }), "in pieces"));
  const nvme::MemoryTable table(space, scattered, 4096);
  CHECK(nvme::device_address(table.range(), reinterpret_cast<uint64_t>(moved.at()) + 4096) == 0x30000);
}

}  // namespace

int main() {
  what_it_says_of_itself();
  transfers(true);
  transfers(false);
  refused_before_the_device_sees_it();
  full_queue_and_one_doorbell_per_batch();
  one_command_fails_alone();
  timeout_quarantines_until_reset();
  an_answer_nobody_asked_for();
  sgl_only_where_it_works();
  starts_that_fail();
  fatal_while_running();
  a_controller_that_does_not_stop_is_reset_from_outside();
  queue_pairs();
  memory_and_tables();
  return 0;
}
