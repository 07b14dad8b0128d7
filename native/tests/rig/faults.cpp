// What goes wrong, and how far it reaches: one command, one queue, the controller.
#include <sys/klog.h>

#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "rig.h"

namespace rig {
namespace {

void queue_full(const Context& context) {
  Session session = open_drive(context, "0");
  const auto memory = session.space->allocate(64 * kKiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), 64 * kKiB);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(8));
  const auto read = [&](uint64_t i) {
    return nvme::Command{nvme::kOpRead, i * 8, 8, &table.range(), table.range().base + i * 4096};
  };
  for (int round = 0; round < 5; ++round) {
    std::memset(memory.at(), 0xEE, 7 * 4096);
    for (uint64_t i = 0; i < 7; ++i) {
      CHECK(issuer.push(read(i), i) == Status::Ok);
    }
    CHECK(issuer.push(read(7), 7) == Status::Retry && issuer.in_flight() == 7);
    CHECK(all_equal(memory.at(), 7 * 4096, 0xEE));  // nothing before the doorbell
    issuer.submit();
    std::array<nvme::Completed, 7> done{};
    const auto deadline = within(10000);
    for (uint32_t ended = 0; ended < 7;) {
      ended += issuer.poll(done.data(), 7);
      CHECK(Clock::now() < deadline);
    }
    CHECK(issuer.in_flight() == 0 && matches(memory.at(), 7 * 4096, salt_of("rig-nvme-0"), 0));
  }
  CHECK(issuer.doorbells() == 5);
}

// A block that the drive can't read fails its own command only.
void medium_error(const Context& context) {
  Session session = open_drive(context, "bad");
  const auto memory = session.space->allocate(64 * kKiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), 64 * kKiB);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(32));
  std::vector<nvme::Command> commands;
  for (uint64_t i = 0; i < 16; ++i) {
    commands.push_back({nvme::kOpRead, kBadBlock - 64 + i * 8, 8, &table.range(), table.range().base + i * 4096});
  }
  std::vector<nvme::CommandResult> results(commands.size());
  CHECK(issuer.run(commands.data(), results.data(), 16, within(10000)) == Status::DeviceError);
  for (uint64_t i = 0; i < 16; ++i) {
    if (i == 8) {
      CHECK(results[i].status == Status::DeviceError && results[i].code == nvme::kUnrecoveredReadError);
    } else {
      CHECK(results[i].status == Status::Ok);
      CHECK(matches(memory.at() + i * 4096, 4096, salt_of("rig-nvme-bad"), (kBadBlock - 64 + i * 8) * kBlock));
    }
  }
  CHECK(!issuer.quarantined() && session.controller->health() == nvme::Health::Ready);
}

void beyond_the_end(const Context& context) {
  Session session = open_drive(context, "0");
  const auto memory = session.space->allocate(64 * kKiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), 64 * kKiB);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(8));
  const uint64_t blocks = session.controller->name_space().blocks;
  std::vector<nvme::Command> commands;
  for (const uint64_t lba : {blocks - 8, blocks - 7, blocks, UINT64_MAX - 100}) {
    commands.push_back({nvme::kOpRead, lba, 8, &table.range(), table.range().base});
  }
  std::vector<nvme::CommandResult> results(commands.size());
  CHECK(issuer.run(commands.data(), results.data(), 4, within(10000)) == Status::DeviceError);
  CHECK(results[0].status == Status::Ok);
  for (size_t i = 1; i < 4; ++i) {
    CHECK(results[i].status == Status::DeviceError && results[i].code == nvme::kLbaOutOfRange);
  }
}

std::string kernel_log() {
  constexpr int kReadAll = 3;
  std::string text(1 << 20, '\0');
  const int bytes = klogctl(kReadAll, text.data(), static_cast<int>(text.size()));
  text.resize(bytes < 0 ? 0 : static_cast<size_t>(bytes));
  return text;
}

// A command that points where nothing is mapped: the IOMMU refuses it and logs it; nothing else is touched. The
// emulated controller may still call the command a success, so its status proves nothing.
void unmapped_address(const Context& context) {
  constexpr uint64_t kNowhere = uint64_t{0x70} << 24;  // inside what the IOMMU translates, never given out
  Session session = open_drive(context, "0");
  const auto memory = session.space->allocate(64 * kKiB, nvme::PageKind::Huge2M);
  std::memset(memory.at(), 0xEE, memory.bytes());
  nvme::DmaRegion wrong{memory.at(), 64 * kKiB, 64 * kKiB, {kNowhere}};
  const nvme::MemoryTable good(session.space, memory.region(), 64 * kKiB);
  const nvme::MemoryTable bad(session.space, wrong, 64 * kKiB);
  {
    nvme::QueueIssuer issuer(session.controller->create_queue_pair(8));
    const nvme::Command read{nvme::kOpRead, 0, 8, &bad.range(), bad.range().base};
    nvme::CommandResult result;
    issuer.run(&read, &result, 1, within(1000));
    std::printf("  (a read to an unmapped address ends with status %d, NVMe status 0x%x)\n",
                static_cast<int>(result.status), result.code);
  }
  CHECK(contains(kernel_log(), "fault addr 0x70000000"));
  CHECK(all_equal(memory.at(), memory.bytes(), 0xEE));
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(8));
  run_one(issuer, {nvme::kOpRead, 0, 8, &good.range(), good.range().base});
  CHECK(matches(memory.at(), 4096, salt_of("rig-nvme-0"), 0));
}

// Memory that was unmapped is out of the drive's reach, though it is still in the process.
void unmapped_after_use(const Context& context) {
  Session session = open_drive(context, "0");
  const auto mine = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, mine.region(), 64 * kKiB);
  auto* const memory = static_cast<uint8_t*>(std::aligned_alloc(4096, 64 * kKiB));
  auto mapped = std::make_unique<nvme::DmaMemory>(session.space->map(memory, 64 * kKiB));
  const nvme::MemoryTable before(session.space, mapped->region(), 4096);
  const uint64_t address = mapped->device(0);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(8));
  run_one(issuer, {nvme::kOpRead, 0, 8, &before.range(), before.range().base});
  CHECK(matches(memory, 4096, salt_of("rig-nvme-0"), 0));
  mapped.reset();
  std::memset(memory, 0xEE, 64 * kKiB);
  const nvme::Command read{nvme::kOpRead, 0, 8, &before.range(), before.range().base};
  nvme::CommandResult result;
  issuer.run(&read, &result, 1, within(1000));
  CHECK(all_equal(memory, 64 * kKiB, 0xEE));
  char text[64];
  std::snprintf(text, sizeof(text), "fault addr 0x%llx", static_cast<unsigned long long>(address));
  CHECK(contains(kernel_log(), text));
  std::free(memory);
}

// The controller fails (here: enabled with queues that can't be); it says so, and a restart brings it back.
void fatal_status(const Context& context) {
  Session session = open_drive(context, "0");
  auto& controller = *session.controller;
  const auto write = [&](uint64_t at, uint32_t value) {
    *reinterpret_cast<volatile uint32_t*>(session.device->registers() + at) = value;
  };
  const auto status = [&] {
    return *reinterpret_cast<volatile uint32_t*>(session.device->registers() + nvme::kRegStatus);
  };
  write(nvme::kRegConfiguration, nvme::configuration(false));
  while ((status() & nvme::kStatusReady) != 0) {
    std::this_thread::yield();
  }
  write(nvme::kRegAdminSq, 0x123);  // not a page
  write(nvme::kRegConfiguration, nvme::configuration(true));
  const auto deadline = within(5000);
  while (controller.health() != nvme::Health::Fatal) {
    CHECK(Clock::now() < deadline);
  }
  CHECK(contains(message_of([&] { controller.create_queue_pair(8); }), "fatal status"));
  controller.stop();
  controller.start();
  CHECK(controller.health() == nvme::Health::Ready);
  const auto memory = session.space->allocate(64 * kKiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), 64 * kKiB);
  nvme::QueueIssuer issuer(controller.create_queue_pair(8));
  run_one(issuer, {nvme::kOpRead, 0, 8, &table.range(), table.range().base});
  CHECK(matches(memory.at(), 4096, salt_of("rig-nvme-0"), 0));
}

}  // namespace

std::vector<Case> fault_cases() {
  return {
      {"queue_full", queue_full, {}},
      {"medium_error", medium_error, {}},
      {"beyond_the_end", beyond_the_end, {}},
      {"unmapped_address", unmapped_address, {}, true},
      {"unmapped_after_use", unmapped_after_use, {}, true},
      {"fatal_status", fatal_status, {}},
  };
}

}  // namespace rig
