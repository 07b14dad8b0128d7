// Every executor on real files: bytes, checksums, faults, deadlines. Run under the sanitizers too.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "nvme_model.h"
#include "tutti/checksum.h"
#include "tutti/gio/gio_executor.h"
#include "tutti/lane_executor.h"

using namespace tutti;
using std::chrono::milliseconds;

namespace {

constexpr uint32_t kObjects = 4;
constexpr uint64_t kPayload = 16384;
constexpr uint64_t kBlocks = 64;
constexpr uint64_t kSlots = 32;

int scratch_file(uint64_t size) {
  char path[] = "/tmp/tutti-executor-XXXXXX";
  const int made = mkstemp(path);
  CHECK(made >= 0 && ftruncate(made, static_cast<off_t>(size)) == 0);
  const int direct = open(path, O_RDWR | O_DIRECT);
  const int fd = direct >= 0 ? direct : open(path, O_RDWR);
  CHECK(fd >= 0 && unlink(path) == 0 && close(made) == 0);
  return fd;
}

enum class Kind { Uring, Posix, GioUring, GioPosix, ModelSgl, ModelPrp, DrivesSgl, DrivesPrp };
using Drives = std::vector<std::shared_ptr<testing::ModelController>>;

std::unique_ptr<Executor> make(Kind kind, const Layout& layout, std::vector<DeviceFile> files, const SlotTable* table,
                               FaultInjector* faults, const Drives& models) {
  if (kind == Kind::Uring || kind == Kind::Posix) {
    const auto lanes = kind == Kind::Uring ? ExecutorKind::Uring : ExecutorKind::Posix;
    return std::make_unique<LaneExecutor>(layout, std::move(files), LaneOptions{lanes, 2, 8, 2, true}, table, faults);
  }
  gio::GioOptions options;
  options.uring = kind == Kind::GioUring;
  options.model = kind == Kind::ModelSgl || kind == Kind::ModelPrp;
  options.pointer = kind == Kind::ModelPrp ? nvme::DataPointer::Prp : nvme::DataPointer::Sgl;
  options.threads = 2;
  options.queue.depth = 4;
  options.queue.blocks = 2;
  options.queue.issuers_per_block = 2;
  options.queue.movers_per_block = 1;
  options.queue.lanes = 4;
  if (!models.empty()) {
    options.queue.command_timeout_ns = 1'000'000'000;
    options.drives = [models, kind](uint32_t issuers) {
      const auto space = nvme::DmaSpace::identity();
      nvme::ControllerOptions made;
      made.pages = nvme::PageKind::Base4K;
      made.allow_sgl = kind == Kind::DrivesSgl;
      std::vector<std::unique_ptr<nvme::UserController>> drives;
      for (const auto& model : models) {
        drives.push_back(std::make_unique<nvme::UserController>(model, space, made));
      }
      return std::make_unique<gio::DriveController>(std::move(drives), space, issuers);
    };
  }
  return std::make_unique<gio::GioExecutor>(layout, std::move(files), options, table, faults);
}

struct Bench {
  std::vector<int> fds{scratch_file(8 << 20), scratch_file(8 << 20)};
  int table_fd = scratch_file(1 << 20);
  int buffered = open(("/proc/self/fd/" + std::to_string(table_fd)).c_str(), O_RDWR);
  SlotTable table{buffered, 0, 65536, kSlots, kObjects, 1};
  FaultInjector faults;
  Drives models;
  std::vector<unsigned char> memory;
  std::unique_ptr<Executor> executor;

  explicit Bench(Kind kind, uint64_t skew)
      : models(models_of(kind)),
        memory(kObjects * kBlocks * kPayload + 4096 + skew),
        executor(make(kind, Layout{kObjects, 1, 1, 0, kPayload, kPayload, kSlots, {0, 0}}, files(), &table, &faults,
                      models)) {
    std::vector<TensorRegion> regions;
    for (uint32_t object = 0; object < kObjects; ++object) {
      regions.push_back({reinterpret_cast<uint64_t>(at(object, 0, skew)), kPayload, kBlocks});
    }
    skew_ = skew;
    executor->start(regions);
  }
  ~Bench() {
    executor->stop(milliseconds(0));
    for (const int fd : fds) {
      close(fd);
    }
    close(table_fd);
    close(buffered);
  }
  static Drives models_of(Kind kind) {
    if (kind != Kind::DrivesSgl && kind != Kind::DrivesPrp) {
      return {};
    }
    constexpr uint64_t kDriveBlocks = kSlots * kObjects * kPayload / testing::ModelController::kBlock;
    return {std::make_shared<testing::ModelController>(kDriveBlocks),
            std::make_shared<testing::ModelController>(kDriveBlocks)};
  }
  std::vector<DeviceFile> files() const {
    std::vector<DeviceFile> result;
    for (const int fd : fds) {
      auto [memory_align, offset_align] = direct_io_alignment(fd);
      result.push_back({fd, offset_align == 0 ? 4096 : memory_align, offset_align == 0 ? 4096 : offset_align});
    }
    return result;
  }
  unsigned char* at(uint32_t object, uint64_t block, uint64_t skew) {
    auto base = reinterpret_cast<uint64_t>(memory.data());
    base = (base + 4095) / 4096 * 4096 + skew;
    return reinterpret_cast<unsigned char*>(base + (object * kBlocks + block) * kPayload);
  }
  unsigned char* at(uint32_t object, uint64_t block) { return at(object, block, skew_); }
  void fill(uint64_t block, uint64_t pattern) {
    testing::Random random(pattern);
    for (uint32_t object = 0; object < kObjects; ++object) {
      for (uint64_t i = 0; i < kPayload; i += 8) {
        const uint64_t word = random.next();
        std::memcpy(at(object, block) + i, &word, 8);
      }
    }
  }
  bool holds(uint64_t block, uint64_t pattern) {
    testing::Random random(pattern);
    for (uint32_t object = 0; object < kObjects; ++object) {
      for (uint64_t i = 0; i < kPayload; i += 8) {
        const uint64_t word = random.next();
        if (std::memcmp(at(object, block) + i, &word, 8) != 0) {
          return false;
        }
      }
    }
    return true;
  }
  std::shared_ptr<Plan> submit(Direction direction, uint32_t count, uint32_t first_block,
                               Clock::time_point deadline = Clock::time_point::max()) {
    std::vector<uint32_t> slots, generations, blocks;
    std::vector<uint8_t> rots;
    for (uint32_t i = 0; i < count; ++i) {
      slots.push_back(i);
      generations.push_back(1);
      rots.push_back(static_cast<uint8_t>(i % 2));
      blocks.push_back(first_block + i);
    }
    return executor->submit(direction, slots, generations, rots, blocks, deadline);
  }
  void store(uint32_t count) {
    auto plan = submit(Direction::Write, count, 0);
    CHECK(plan->wait(Clock::time_point::max()));
    for (uint32_t slot = 0; slot < count; ++slot) {
      CHECK(plan->block_status(slot) == Status::Ok);
      CHECK(table.write_sums(slot, 0, std::span(plan->sums).subspan(slot * kObjects, kObjects)) == Status::Ok);
      SlotRecord record;
      record.state = static_cast<uint8_t>(RecordState::Resident);
      record.slot = slot;
      record.generation = 1;
      CHECK(table.write_record(record) == Status::Ok);
    }
  }

 private:
  uint64_t skew_ = 0;
};

void brings_back_what_was_stored(Bench& bench) {
  for (uint32_t block = 0; block < 30; ++block) {
    bench.fill(block, 100 + block);
  }
  bench.store(30);
  auto plan = bench.submit(Direction::Read, 30, 32);
  for (uint32_t layer = 0; layer < kObjects; ++layer) {
    CHECK(plan->wait_layer(layer, Clock::time_point::max()));
  }
  CHECK(plan->wait(Clock::time_point::max()) && plan->drained());
  for (uint32_t block = 0; block < 30; ++block) {
    CHECK(plan->block_status(block) == Status::Ok && bench.holds(32 + block, 100 + block));
  }
}

void every_fault_has_its_status(Bench& bench) {
  const struct {
    FaultKind kind;
    int error;
    Status status;
  } cases[] = {{FaultKind::Error, EIO, Status::DeviceError}, {FaultKind::Error, ENOSPC, Status::NoSpace},
               {FaultKind::Error, EAGAIN, Status::Retry},    {FaultKind::Error, ECANCELED, Status::Cancelled},
               {FaultKind::Short, 0, Status::ShortIo},       {FaultKind::Corrupt, 0, Status::ChecksumError}};
  for (const auto& one : cases) {
    bench.faults.add(Direction::Read, 1, 1, {one.kind, one.error, 5}, 1);
    auto plan = bench.submit(Direction::Read, 10, 32);
    CHECK(plan->wait(Clock::time_point::max()));
    uint32_t bad = 0;
    for (uint32_t block = 0; block < 10; ++block) {
      if (plan->block_status(block) != Status::Ok) {
        CHECK(plan->block_status(block) == one.status);
        ++bad;
      }
    }
    CHECK(bad == 1);
    bench.faults.clear();
  }
}

void io_that_never_returns_ends_by_its_deadline(Bench& bench) {
  bench.faults.add(Direction::Read, 0, 1, {FaultKind::Hang, 0, 0}, 1);
  auto stuck = bench.submit(Direction::Read, 4, 32, Clock::now() + milliseconds(50));
  CHECK(stuck->wait(Clock::time_point::max()) && stuck->ended_early() && !stuck->drained());
  CHECK(stuck->block_status(0) == Status::Timeout);
  bench.faults.clear();
  auto other = bench.submit(Direction::Read, 10, 40);  // others are still served
  CHECK(other->wait(Clock::time_point::max()) && other->block_status(9) == Status::Ok);
  bench.faults.release();
  CHECK(stuck->wait_drained(Clock::now() + std::chrono::seconds(10)));
}

void a_write_that_is_damaged_on_its_way_is_noticed(Bench& bench) {
  bench.faults.add(Direction::Write, -1, 1, {FaultKind::Corrupt, 0, 9}, 1);
  bench.store(5);
  bench.faults.clear();
  auto plan = bench.submit(Direction::Read, 5, 32);
  CHECK(plan->wait(Clock::time_point::max()));
  uint32_t bad = 0;
  for (uint32_t block = 0; block < 5; ++block) {
    bad += plan->block_status(block) == Status::ChecksumError ? 1 : 0;
  }
  CHECK(bad == 1);
  bench.store(5);
}

void a_slot_of_another_generation_is_stale(Bench& bench) {
  auto plan = bench.executor->submit(Direction::Read, {0, 1}, {1, 2}, {0, 1}, {40, 41}, Clock::time_point::max());
  CHECK(plan->wait(Clock::time_point::max()));
  CHECK(plan->block_status(0) == Status::Ok && plan->block_status(1) == Status::Stale);
}

// A block that a drive can't read costs its object's block alone; a drive that hangs ends what it has by the command's
// time limit, and the plan is drained then.
void what_drives_do_wrong(Bench& bench) {
  bench.models[1]->switches.bad_lba = 3 * kPayload / testing::ModelController::kBlock;
  auto plan = bench.submit(Direction::Read, 10, 32);
  CHECK(plan->wait(Clock::time_point::max()) && plan->drained());
  uint32_t bad = 0;
  for (uint32_t block = 0; block < 10; ++block) {
    CHECK(plan->block_status(block) == Status::Ok || plan->block_status(block) == Status::DeviceError);
    bad += plan->block_status(block) == Status::Ok ? 0 : 1;
  }
  CHECK(bad == 1 && bench.executor->note().empty());
  bench.models[1]->switches.bad_lba = UINT64_MAX;
  bench.models[0]->switches.hold_io = true;
  plan = bench.submit(Direction::Read, 10, 32, Clock::now() + milliseconds(50));
  CHECK(plan->wait(Clock::time_point::max()) && !plan->drained());
  CHECK(plan->wait_drained(Clock::now() + std::chrono::seconds(30)));
  CHECK(bench.executor->note().find("queue pairs are left") != std::string::npos);
  bench.models[0]->switches.hold_io = false;
  CHECK(bench.models[0]->bus_master() && bench.models[0]->function_resets() == 0);  // deleting the pairs was enough
}

}  // namespace

int main() {
  for (const Kind kind : {Kind::Uring, Kind::Posix, Kind::GioUring, Kind::GioPosix, Kind::ModelSgl, Kind::ModelPrp}) {
    if (kind == Kind::Uring || kind == Kind::GioUring) {
      if (const std::string why = probe_uring(); !why.empty()) {
        std::printf("uring not tested: %s\n", why.c_str());
        continue;
      }
    }
    for (const uint64_t skew : {uint64_t{0}, uint64_t{64}}) {  // the device takes the memory itself, or only staging
      Bench bench(kind, skew);
      brings_back_what_was_stored(bench);
      every_fault_has_its_status(bench);
      io_that_never_returns_ends_by_its_deadline(bench);
      a_write_that_is_damaged_on_its_way_is_noticed(bench);
      a_slot_of_another_generation_is_stale(bench);
    }
  }
  for (const Kind kind : {Kind::DrivesSgl, Kind::DrivesPrp}) {
    for (const uint64_t skew : {uint64_t{0}, uint64_t{64}, uint64_t{1}}) {  // the last only through slots
      Bench bench(kind, skew);
      brings_back_what_was_stored(bench);
      a_slot_of_another_generation_is_stale(bench);
      what_drives_do_wrong(bench);
    }
  }
  return 0;
}
