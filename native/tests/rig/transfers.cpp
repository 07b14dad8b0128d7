// Bytes: every form of describing memory, both ways, host memory and a peer's BAR, one and several drives and queues.
//
// Each case writes an area of its own beyond kPatternBytes, with a salt of its own; the kernel compares it afterwards.
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <set>
#include <thread>

#include "rig.h"
#include "tutti/layout.h"

namespace rig {
namespace {

constexpr uint32_t kPage = 64 * kKiB;  // of the tables: the GPU's

void identify(const Context& context) {
  for (const auto& drive : context.drives) {
    const Session session = open_drive(context, drive.serial.substr(9));
    const auto& controller = *session.controller;
    CHECK(controller.serial() == drive.serial && controller.model() == drive.model);
    CHECK(controller.name_space().block_bytes == drive.block_bytes);
    CHECK(controller.name_space().blocks * drive.block_bytes == drive.bytes);
    CHECK(controller.identity().largest_transfer == drive.largest_transfer);
    CHECK(controller.queue_pairs() == 16 && controller.largest_queue() == 2048);
    CHECK(controller.pointer() == nvme::DataPointer::Sgl && controller.no_sgl_reason().empty());
    CHECK(controller.health() == nvme::Health::Ready);
  }
}

// Which forms the commands of a queue really had, read from its submission queue.
class Forms {
 public:
  void see(const nvme::QueueIssuer& issuer, const nvme::P2pRange& range) {
    const nvme::QueuePair& pair = issuer.pair();
    const nvme::SubmissionEntry& entry = pair.sq[next_++ % pair.entries];
    if (nvme::pointer_of(entry) == nvme::DataPointer::Prp) {
      const auto slot = nvme::identifier_of(entry);
      seen_.insert(entry.dptr_hi == 0 ? "one" : (entry.dptr_hi == pair.scratch[slot].address ? "list" : "two"));
      return;
    }
    const nvme::DataDescriptor data{entry.dptr_lo, entry.dptr_hi};
    if (nvme::sgl_identifier(data) == nvme::kSglDataBlock) {
      seen_.insert("inline");
    } else {
      const bool in_table = data.lo >= range.entries_address && data.lo < range.entries_address + range.pages * 16;
      seen_.insert(in_table ? "table" : "scratch");
    }
  }
  [[nodiscard]] bool are(const std::set<std::string>& wanted) const { return seen_ == wanted; }

 private:
  std::set<std::string> seen_;
  uint64_t next_ = 0;
};

constexpr std::array<uint64_t, 11> kSizes = {
    512, 1024, 4096, 8192, kPage - 512, kPage, kPage + 512, 2 * kPage, 3 * kPage + 512, 4 * kPage, 8 * kPage};
constexpr std::array<uint64_t, 6> kStarts = {0, 512, 4096 - 512, kPage - 512, kPage, 2 * kPage + 4};

// Half of the sizes and starts are written too, so that each start is with every other size.
bool also_written(size_t size, size_t start) { return (size + start) % 2 == 1; }

// Reads of every size at every start, compared with what the kernel wrote, and writes for the kernel to compare.
void by_every_form(Session& session, const Drive& drive, const nvme::DmaRegion& memory, uint32_t page_bytes,
                   uint64_t area, uint64_t salt) {
  const nvme::MemoryTable table(session.space, memory, page_bytes);
  const auto& range = table.range();
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
  const bool by_sgl = issuer.pair().pointer == nvme::DataPointer::Sgl;
  Forms forms;
  uint64_t turn = 0;
  uint64_t place = area;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    const uint64_t bytes = kSizes[i];
    CHECK(bytes <= issuer.pair().largest_transfer);
    for (size_t j = 0; j < kStarts.size(); ++j) {
      const uint64_t start = kStarts[j];
      const uint64_t from = (turn++ * 37 * kBlock) % (kPatternBytes - kMiB);
      uint8_t* const at = memory.at + start;
      const uint64_t before = start == 0 ? 0 : 4;
      std::memset(at - before, 0xEE, bytes + before + 64);
      const auto blocks = static_cast<uint32_t>(bytes / kBlock);
      run_one(issuer, {nvme::kOpRead, from / kBlock, blocks, &range, range.base + start});
      forms.see(issuer, range);
      CHECK(matches(at, bytes, salt_of(drive.serial), from));
      CHECK(all_equal(at - before, before, 0xEE) && all_equal(at + bytes, 64, 0xEE));
      if (also_written(i, j)) {
        fill(at, bytes, salt, place);
        run_one(issuer, {nvme::kOpWrite, place / kBlock, blocks, &range, range.base + start});
        forms.see(issuer, range);
        place += bytes;
      }
    }
  }
  run_one(issuer, {nvme::kOpFlush, 0, 0, nullptr, 0});
  CHECK(by_sgl ? forms.are({"inline", "table", "scratch"}) : forms.are({"one", "two", "list"}));
  session.controller->delete_queue_pair(issuer.pair().id);
}

uint64_t written_bytes() {
  uint64_t total = 0;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    for (size_t j = 0; j < kStarts.size(); ++j) {
      total += also_written(i, j) ? kSizes[i] : 0;
    }
  }
  return total;
}

constexpr uint64_t kStep = 6 * kMiB;  // an area of by_every_form
uint64_t area_of(uint64_t salt) { return kPatternBytes + (salt - 100) * kStep; }

std::function<void(const Context&)> written(uint64_t salt) {
  return [salt](const Context& context) {
    CHECK(written_bytes() <= kStep);
    check_by_kernel(context.drive("0"), salt, area_of(salt), written_bytes());
  };
}

nvme::ControllerOptions with_sgl(bool allow) {
  nvme::ControllerOptions options;
  options.allow_sgl = allow;
  return options;
}

// Host memory in huge pages, with tables of 64 KiB pages.
void host_memory(const Context& context, bool sgl, uint64_t salt) {
  Session session = open_drive(context, "0", with_sgl(sgl));
  CHECK((session.controller->pointer() == nvme::DataPointer::Sgl) == sgl);
  const auto memory = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  by_every_form(session, context.drive("0"), memory.region(), kPage, area_of(salt), salt);
}

// The caller's own memory in 4 KiB pages, scattered under uio; queues without huge pages.
void small_pages(const Context& context) {
  nvme::ControllerOptions options;
  options.pages = nvme::PageKind::Base4K;
  Session session = open_drive(context, "0", options);
  void* const mine = mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mine != MAP_FAILED);
  {
    const auto memory = session.space->map(mine, kMiB);
    by_every_form(session, context.drive("0"), memory.region(), 4096, area_of(102), 102);
  }
  if (context.driver == nvme::UserDriver::Uio) {
    // 4 KiB pages may lie side by side by chance.
    const std::string said = message_of([&] { session.controller->create_queue_pair(2048); });
    CHECK(said.empty() || contains(said, "at most 64 entries"));
  } else {
    const auto chosen = session.space->map(mine, kMiB, 0x12'3456'0000);
    CHECK(chosen.device(4096) == 0x12'3456'1000);
    CHECK(contains(message_of([&] { session.space->map(mine, kMiB, 0x12'3457'0000); }), "are taken up to"));
  }
  munmap(mine, kMiB);
}

// From device to device: the drive reads and writes the BAR of another PCI device itself.
void peer_to_peer(const Context& context, bool sgl, uint64_t salt) {
  Session session = open_drive(context, "0", with_sgl(sgl));
  const nvme::PeerBar bar(context.peer, 2);
  const auto memory = session.space->map_peer({bar.window().at, 4 * kMiB, bar.window().physical});
  if (context.driver == nvme::UserDriver::Uio) {
    CHECK(memory.device(0) == bar.window().physical);
  }
  by_every_form(session, context.drive("0"), memory.region(), kPage, area_of(salt), salt);
}

// --- a tensor stripe over two drives ---

tutti::Layout stripe() {
  tutti::Layout layout;
  layout.objects = 7;
  layout.payload_bytes = 96 * kKiB;
  layout.object_bytes = 96 * kKiB;  // one and a half pages: every object in other forms
  layout.slots = 6;
  layout.data_offset = {40 * kMiB, 41 * kMiB + 512};
  return layout;
}
uint64_t object_salt(uint64_t slot, uint32_t object) { return 1000 + slot * 100 + object; }

void striped(const Context& context) {
  const auto space = nvme::dma_space_for(context.driver);
  std::array<Session, 2> sessions = {open_drive(context, "0", {}, space), open_drive(context, "1", {}, space)};
  const tutti::Layout layout = stripe();
  const auto memory = space->allocate(layout.slots * layout.objects * layout.object_bytes, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(space, memory.region(), kPage);
  std::array<nvme::QueueIssuer, 2> issuers = {nvme::QueueIssuer(sessions[0].controller->create_queue_pair(64)),
                                              nvme::QueueIssuer(sessions[1].controller->create_queue_pair(64))};
  std::array<uint32_t, 2> commands{};
  for (const uint8_t opcode : {nvme::kOpWrite, nvme::kOpRead}) {
    uint64_t place = 0;
    for (uint64_t slot = 0; slot < layout.slots; ++slot) {
      for (uint32_t object = 0; object < layout.objects; ++object, place += layout.object_bytes) {
        const auto at = layout.address(slot, static_cast<uint32_t>(slot % 2), object);
        if (opcode == nvme::kOpWrite) {
          fill(memory.at() + place, layout.object_bytes, object_salt(slot, object), 0);
        } else {
          std::memset(memory.at() + place, 0xEE, layout.object_bytes);
        }
        ++commands[at.device];
        CHECK(issuers[at.device].push({opcode, at.offset / kBlock, static_cast<uint32_t>(layout.object_bytes / kBlock),
                                       &table.range(), table.range().base + place},
                                      place) == Status::Ok);
      }
    }
    for (auto& issuer : issuers) {  // both drives work at once
      issuer.submit();
      CHECK(issuer.doorbells() == (opcode == nvme::kOpWrite ? 1 : 2));
    }
    const auto deadline = within(10000);
    for (uint64_t ended = 0; ended < layout.slots * layout.objects;) {
      for (auto& issuer : issuers) {
        std::array<nvme::Completed, 8> some{};
        const uint32_t found = issuer.poll(some.data(), some.size());
        for (uint32_t i = 0; i < found; ++i) {
          CHECK(some[i].result.status == Status::Ok);
        }
        ended += found;
      }
      CHECK(Clock::now() < deadline);
    }
  }
  CHECK(commands[0] == commands[1]);
  for (uint64_t i = 0; i < layout.slots * layout.objects; ++i) {
    CHECK(matches(memory.at() + i * layout.object_bytes, layout.object_bytes,
                  object_salt(i / layout.objects, static_cast<uint32_t>(i % layout.objects)), 0));
  }
}

void striped_by_kernel(const Context& context) {
  const tutti::Layout layout = stripe();
  auto* const memory = static_cast<uint8_t*>(std::aligned_alloc(4096, layout.object_bytes));
  for (uint64_t slot = 0; slot < layout.slots; ++slot) {
    for (uint32_t object = 0; object < layout.objects; ++object) {
      const auto at = layout.address(slot, static_cast<uint32_t>(slot % 2), object);
      read_by_kernel(context.drive(at.device == 0 ? "0" : "1"), memory, at.offset, layout.object_bytes);
      CHECK(matches(memory, layout.object_bytes, object_salt(slot, object), 0));
    }
  }
  std::free(memory);
}

// --- several queue pairs, a thread each ---

constexpr uint64_t kQueues = 8;
constexpr uint64_t kQueueArea = 44 * kMiB;
constexpr uint64_t kQueueBytes = kMiB;

void queues_at_once(const Context& context) {
  Session session = open_drive(context, "1");
  const auto memory = session.space->allocate(kQueues * kQueueBytes, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), kPage);
  std::vector<nvme::QueuePair> pairs;
  for (uint64_t i = 0; i < kQueues; ++i) {
    pairs.push_back(session.controller->create_queue_pair(8));  // fewer places than commands
  }
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < kQueues; ++i) {
    threads.emplace_back([&, i] {
      nvme::QueueIssuer issuer(pairs[i]);
      uint8_t* const at = memory.at() + i * kQueueBytes;
      fill(at, kQueueBytes, 200 + i, kQueueArea + i * kQueueBytes);
      for (const uint8_t opcode : {nvme::kOpWrite, nvme::kOpRead}) {
        std::vector<nvme::Command> commands;
        for (uint64_t offset = 0; offset < kQueueBytes; offset += 16 * kKiB) {
          commands.push_back({opcode, (kQueueArea + i * kQueueBytes + offset) / kBlock, 32, &table.range(),
                              table.range().base + i * kQueueBytes + offset});
        }
        std::vector<nvme::CommandResult> results(commands.size());
        CHECK(issuer.run(commands.data(), results.data(), static_cast<uint32_t>(commands.size()), within(20000)) ==
              Status::Ok);
        if (opcode == nvme::kOpWrite) {
          std::memset(at, 0xEE, kQueueBytes);
        }
      }
      CHECK(matches(at, kQueueBytes, 200 + i, kQueueArea + i * kQueueBytes));
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

void queues_by_kernel(const Context& context) {
  for (uint64_t i = 0; i < kQueues; ++i) {
    check_by_kernel(context.drive("1"), 200 + i, kQueueArea + i * kQueueBytes, kQueueBytes);
  }
}

}  // namespace

std::vector<Case> transfer_cases() {
  return {
      {"identify", identify, {}},
      {"prp", [](const Context& context) { host_memory(context, false, 100); }, written(100)},
      {"sgl", [](const Context& context) { host_memory(context, true, 101); }, written(101)},
      {"small_pages", small_pages, written(102)},
      {"peer_to_peer_prp", [](const Context& context) { peer_to_peer(context, false, 103); }, written(103)},
      {"peer_to_peer_sgl", [](const Context& context) { peer_to_peer(context, true, 104); }, written(104)},
      {"stripe_over_two_drives", striped, striped_by_kernel},
      {"queues_at_once", queues_at_once, queues_by_kernel},
  };
}

}  // namespace rig
