// The executor on drives: plans, deadlines and checksums of slots, with the drives opened by address.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <span>
#include <thread>

#include "ring.h"
#include "tutti/gio/gio_executor.h"
#include "tutti/slot_table.h"

namespace rig {
namespace {

constexpr uint64_t kArea = kRingArea + 13 * kRingStep;
constexpr uint32_t kObjectsOfBlock = 5;
constexpr uint32_t kPayload = 64 * kKiB;
constexpr uint32_t kStored = 12;  // blocks; they come back into the kStored ones behind them
constexpr auto kSettled = std::chrono::milliseconds(1000);

tutti::Layout layout_over(size_t drives, uint64_t area) {
  tutti::Layout layout;
  layout.objects = kObjectsOfBlock;
  layout.payload_bytes = layout.object_bytes = kPayload;
  layout.slots = kStored;
  layout.data_offset.assign(drives, area);
  return layout;
}

struct Engine {
  std::vector<std::string> names;
  tutti::Layout layout;
  int table_fd = memfd_create("slot-table", MFD_CLOEXEC);
  tutti::SlotTable table{table_fd, 0, 65536, kStored, kObjectsOfBlock, 1};
  uint64_t bytes = uint64_t{2} * kStored * kObjectsOfBlock * kPayload;
  uint8_t* memory;
  std::unique_ptr<tutti::gio::GioExecutor> executor;

  Engine(const Context& context, std::vector<std::string> drives, uint64_t area, std::chrono::nanoseconds timeout)
      : names(std::move(drives)), layout(layout_over(names.size(), area)) {
    CHECK(table_fd >= 0 && ftruncate(table_fd, 1 << 20) == 0);
    memory = static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(memory != MAP_FAILED);
    tutti::gio::GioOptions options;
    options.queue.depth = 4;
    options.queue.blocks = 1;
    options.queue.issuers_per_block = kIssuers;
    options.queue.movers_per_block = 1;
    options.queue.lanes = 8;
    options.queue.command_timeout_ns = static_cast<uint64_t>(timeout.count());
    std::vector<std::string> addresses;
    for (const auto& name : names) {
      addresses.push_back(context.drive(name).address);
    }
    options.drives = [addresses](uint32_t issuers) { return gio::DriveController::open(addresses, {}, issuers); };
    executor = std::make_unique<tutti::gio::GioExecutor>(layout, std::vector<tutti::DeviceFile>(names.size()), options,
                                                         &table, nullptr);
    std::vector<tutti::TensorRegion> regions;
    for (uint32_t object = 0; object < kObjectsOfBlock; ++object) {
      regions.push_back({reinterpret_cast<uint64_t>(at(object, 0)), kPayload, uint64_t{2} * kStored});
    }
    executor->start(regions);
  }
  ~Engine() {
    executor.reset();
    munmap(memory, bytes);
    close(table_fd);
  }
  [[nodiscard]] uint8_t* at(uint32_t object, uint32_t block) const {
    return memory + (uint64_t{object} * 2 * kStored + block) * kPayload;
  }
  std::shared_ptr<tutti::Plan> submit(Direction direction, uint32_t first_block,
                                      Clock::time_point deadline = Clock::time_point::max()) {
    std::vector<uint32_t> slots;
    std::vector<uint32_t> blocks;
    std::vector<uint8_t> rots;
    for (uint32_t i = 0; i < kStored; ++i) {
      slots.push_back(i);
      blocks.push_back(first_block + i);
      rots.push_back(static_cast<uint8_t>(i % 2));
    }
    return executor->submit(direction, slots, std::vector<uint32_t>(kStored, 1), rots, blocks, deadline);
  }
  void record(const std::vector<uint64_t>& sums) {
    for (uint32_t slot = 0; slot < kStored; ++slot) {
      CHECK(table.write_sums(slot, 0, std::span(sums).subspan(slot * kObjectsOfBlock, kObjectsOfBlock)) == Status::Ok);
      tutti::SlotRecord record;
      record.state = static_cast<uint8_t>(tutti::RecordState::Resident);
      record.slot = slot;
      record.generation = 1;
      CHECK(table.write_record(record) == Status::Ok);
    }
  }
};

uint64_t salt(uint32_t slot, uint32_t object) { return 7000 + slot * 100 + object; }

void there_and_back(const Context& context) {
  Engine engine(context, {"0", "1"}, kArea, std::chrono::seconds(20));
  CHECK(engine.executor->pinned_bytes() != 0);
  for (uint32_t slot = 0; slot < kStored; ++slot) {
    for (uint32_t object = 0; object < kObjectsOfBlock; ++object) {
      fill(engine.at(object, slot), kPayload, salt(slot, object), 0);
    }
  }
  auto plan = engine.submit(Direction::Write, 0, within(20000));
  CHECK(plan->wait(Clock::time_point::max()) && plan->drained());
  engine.record(plan->sums);
  plan = engine.submit(Direction::Read, kStored, within(20000));
  for (uint32_t layer = 0; layer < kObjectsOfBlock; ++layer) {
    CHECK(plan->wait_layer(layer, Clock::time_point::max()));
  }
  CHECK(plan->wait(Clock::time_point::max()) && plan->drained());
  for (uint32_t slot = 0; slot < kStored; ++slot) {
    CHECK(plan->block_status(slot) == Status::Ok);
    for (uint32_t object = 0; object < kObjectsOfBlock; ++object) {
      CHECK(matches(engine.at(object, kStored + slot), kPayload, salt(slot, object), 0));
    }
  }
  CHECK(engine.executor->stats().objects_read == kStored * kObjectsOfBlock && engine.executor->note().empty());
}

void seen_by_kernel(const Context& context) {
  const tutti::Layout layout = layout_over(2, kArea);
  std::vector<uint8_t> bytes(kPayload);
  for (uint32_t slot = 0; slot < kStored; ++slot) {
    for (uint32_t object = 0; object < kObjectsOfBlock; ++object) {
      const auto place = layout.address(slot, slot % 2, object);
      read_by_kernel(context.drive(place.device == 0 ? "0" : "1"), bytes.data(), place.offset, kPayload);
      CHECK(matches(bytes.data(), kPayload, salt(slot, object), 0));
    }
  }
}

// A plan whose deadline passes ends at once; it is drained when its memory is free, and nothing arrives after that.
void deadline(const Context& context) {
  Engine engine(context, {"0", "slow"}, 0, std::chrono::milliseconds(400));
  engine.record(std::vector<uint64_t>(kStored * kObjectsOfBlock));  // of nothing that is read here
  const auto plan = engine.submit(Direction::Read, kStored, within(100));
  CHECK(plan->wait(Clock::time_point::max()) && plan->ended_early() && !plan->drained());
  CHECK(plan->wait_drained(within(20000)));
  CHECK(contains(engine.executor->note(), "queue pairs are left"));
  std::memset(engine.memory, 0xEE, engine.bytes);
  std::this_thread::sleep_for(kSettled);
  CHECK(all_equal(engine.memory, engine.bytes, 0xEE));
  const auto after = engine.submit(Direction::Read, kStored, within(20000));
  CHECK(after->wait(Clock::time_point::max()) && after->drained());
  CHECK(after->block_status(0) != Status::Ok);  // nothing that is on these drives has the sums recorded
}

// Stopping with commands in flight returns when the drives are done with memory.
void stopped_in_flight(const Context& context) {
  Engine engine(context, {"slow"}, 0, std::chrono::milliseconds(400));
  engine.record(std::vector<uint64_t>(kStored * kObjectsOfBlock));  // of nothing that is read here
  const auto plan = engine.submit(Direction::Read, kStored);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  engine.executor->stop(std::chrono::milliseconds(0));
  CHECK(plan->drained());
  std::memset(engine.memory, 0xEE, engine.bytes);
  std::this_thread::sleep_for(kSettled);
  CHECK(all_equal(engine.memory, engine.bytes, 0xEE));
}

}  // namespace

std::vector<Case> executor_cases() {
  return {
      {"executor_on_two_drives", there_and_back, seen_by_kernel},
      {"executor_deadline", deadline, {}},
      {"executor_stopped_in_flight", stopped_in_flight, {}},
  };
}

}  // namespace rig
