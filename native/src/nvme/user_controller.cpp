#include "tutti/nvme/user_controller.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <thread>

#include "sysfs.h"
#include "tutti/nvme/queue_issuer.h"

namespace tutti::nvme {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kAdminEntries = 32;
constexpr uint64_t kPage = kBasePageBytes;
constexpr uint64_t kAdminSq = 0;
constexpr uint64_t kAdminCq = kPage;
constexpr uint64_t kAdminData = 2 * kPage;
constexpr uint64_t kProbeTable = 3 * kPage;
constexpr uint64_t kProbeData = 4 * kPage;
constexpr uint64_t kProbePages = 8;
constexpr uint64_t kAdminBytes = kProbeData + kProbePages * kPage;

constexpr uint32_t kShutdownNormal = 1U << 14;  // CC.SHN
constexpr uint32_t kShutdownMask = 3U << 14;
constexpr uint32_t kShutdownDone = 2U << 2;  // CSTS.SHST
constexpr uint32_t kShutdownStatus = 3U << 2;
constexpr uint32_t kGone = 0xFFFFFFFF;                  // what reads of a device that left the bus give
constexpr uint64_t kNvmCommandSet = uint64_t{1} << 37;  // CAP.CSS

std::string hex(uint64_t value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(value));
  return text.data();
}

// A field of Identify: ASCII, padded with spaces.
std::string text_of(const uint8_t* data, size_t bytes) {
  std::string text(reinterpret_cast<const char*>(data), bytes);
  text.erase(text.find_last_not_of(std::string(" \0", 2)) + 1);
  return text;
}

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

const char* health_name(Health health) noexcept {
  switch (health) {
    case Health::Ready:
      return "ready";
    case Health::Stopped:
      return "stopped";
    case Health::Fatal:
      return "fatal status";
    case Health::Gone:
      return "gone from the bus";
  }
  return "unknown";
}

UserController::UserController(std::shared_ptr<ControllerPort> port, std::shared_ptr<DmaSpace> space,
                               ControllerOptions options)
    : port_(std::move(port)), space_(std::move(space)), options_(options) {
  admin_memory_ = space_->allocate(kAdminBytes, options_.pages);
  start();
}

UserController::~UserController() { shut_down(); }

// --- registers ---

uint32_t UserController::read32(uint64_t offset) const noexcept {
  return load_acquire(reinterpret_cast<const uint32_t*>(port_->registers() + offset));
}
void UserController::write32(uint64_t offset, uint32_t value) noexcept {
  ring_doorbell(reinterpret_cast<uint32_t*>(port_->registers() + offset), value);
}
// In halves: not every controller takes 64-bit accesses.
uint64_t UserController::read64(uint64_t offset) const noexcept {
  return read32(offset) | static_cast<uint64_t>(read32(offset + 4)) << 32;
}
void UserController::write64(uint64_t offset, uint64_t value) noexcept {
  write32(offset, static_cast<uint32_t>(value));
  write32(offset + 4, static_cast<uint32_t>(value >> 32));
}

Health UserController::health() const noexcept {
  const uint32_t status = read32(kRegStatus);
  if (status == kGone) {
    return Health::Gone;
  }
  if ((status & kStatusFatal) != 0) {
    return Health::Fatal;
  }
  return started_ && (status & kStatusReady) != 0 ? Health::Ready : Health::Stopped;
}

// --- start and stop ---

uint32_t UserController::ready_bound_ms() const noexcept {
  return std::max(capability_.timeout_ms, 500U) + 500;  // CAP.TO is the worst case by its own word; some say 0
}

// False at the deadline, at a fatal status (where readiness is awaited), and when the device is gone.
bool UserController::becomes_ready(bool ready) const noexcept {
  const auto deadline = Clock::now() + std::chrono::milliseconds(ready_bound_ms());
  while (true) {
    const uint32_t status = read32(kRegStatus);
    if (status == kGone || (ready && (status & kStatusFatal) != 0)) {
      return false;
    }
    if (((status & kStatusReady) != 0) == ready) {
      return true;
    }
    if (Clock::now() >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void UserController::wait_ready(bool ready) {
  if (becomes_ready(ready)) {
    return;
  }
  const uint32_t status = read32(kRegStatus);
  if (status == kGone) {
    fail(port_->name() + ": the device is gone from the bus");
  }
  if (ready && (status & kStatusFatal) != 0) {
    fail(port_->name() + ": fatal status while starting (CSTS " + hex(status) + "); power-cycle the drive if it stays");
  }
  fail(port_->name() + ": CSTS.RDY didn't become " + (ready ? "1" : "0") + " within " +
       std::to_string(ready_bound_ms()) + " ms (CSTS " + hex(status) + ")");
}

void UserController::disable() {
  const uint32_t before = read32(kRegConfiguration);
  if ((before & 1) != 0 && (read32(kRegStatus) & (kStatusReady | kStatusFatal)) == 0) {
    (void)becomes_ready(true);  // being enabled by an owner that died: it must not be disabled halfway
  }
  write32(kRegConfiguration, before & ~(1U | kShutdownMask));
  wait_ready(false);
}

void UserController::start() {
  if (started_) {
    fail(port_->name() + " is started already");
  }
  port_->set_bus_master(false);
  const uint64_t cap = read64(kRegCap);
  if (cap == UINT64_MAX) {
    fail(port_->name() + ": the device is gone from the bus, or its memory decoding is off");
  }
  capability_ = capabilities(cap);
  if (capability_.least_page > kPage || (cap & kNvmCommandSet) == 0) {
    fail(port_->name() + " isn't a controller for this driver: it wants 4 KiB pages and the NVM command set (CAP " +
         hex(cap) + ")");
  }
  try {
    disable();
  } catch (const std::runtime_error& error) {
    if (!port_->reset_function()) {
      throw;
    }
    port_->set_bus_master(false);
    disable();
  }
  queues_.clear();

  std::memset(admin_memory_.at(), 0, 2 * kPage);
  admin_tail_ = admin_head_ = 0;
  admin_phase_ = 1;
  write32(kRegAdminQueues, admin_queue_attributes(kAdminEntries));
  write64(kRegAdminSq, admin_memory_.device(kAdminSq));
  write64(kRegAdminCq, admin_memory_.device(kAdminCq));
  port_->set_bus_master(true);
  try {
    write32(kRegConfiguration, configuration(true));
    wait_ready(true);
    started_ = true;
    identify();
    probe_sgl();
  } catch (...) {
    started_ = false;
    port_->set_bus_master(false);
    queues_.clear();
    throw;
  }
}

void UserController::stop() {
  started_ = false;
  try {
    disable();
  } catch (const std::runtime_error&) {
    // A controller that doesn't obey loses its access to memory instead; that alone makes its memory free again.
    (void)port_->reset_function();
  }
  port_->set_bus_master(false);
}

void UserController::shut_down() noexcept {
  try {
    if (health() == Health::Ready) {
      write32(kRegConfiguration, (read32(kRegConfiguration) & ~kShutdownMask) | kShutdownNormal);
      const auto deadline = Clock::now() + options_.command_timeout;
      while ((read32(kRegStatus) & kShutdownStatus) != kShutdownDone && health() == Health::Ready &&
             Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    stop();
  } catch (const std::exception& error) {
    // Only switching DMA off can have failed. The queues' memory is then leaked rather than given to somebody else.
    std::fprintf(stderr, "tutti: %s: shutdown failed, its queues' memory is kept: %s\n", port_->name().c_str(),
                 error.what());
    for (auto& queue : queues_) {
      queue->memory.leak();
    }
    admin_memory_.leak();
  }
}

// --- admin commands ---

CompletionEntry UserController::admin(const SubmissionEntry& command, const char* what) {
  auto* const sq = reinterpret_cast<SubmissionEntry*>(admin_memory_.at() + kAdminSq);
  auto* const cq = reinterpret_cast<CompletionEntry*>(admin_memory_.at() + kAdminCq);
  sq[admin_tail_] = command;
  sq[admin_tail_].cdw0 = (command.cdw0 & 0xFFFF) | static_cast<uint32_t>(++admin_identifier_) << 16;
  admin_tail_ = (admin_tail_ + 1) % kAdminEntries;
  write32(sq_doorbell(0, capability_.doorbell_stride), admin_tail_);
  const auto deadline = Clock::now() + options_.command_timeout;
  while (true) {
    const uint32_t status = load_completion(&cq[admin_head_]);
    if ((status >> 16 & 1) == admin_phase_) {
      break;
    }
    if (const Health now = health(); started_ && now != Health::Ready) {
      fail(port_->name() + ": " + what + ": the controller is in state '" + health_name(now) + "'");
    }
    if (Clock::now() >= deadline) {
      started_ = false;  // a late answer would pass for that of the next command
      fail(port_->name() + ": " + what + ": no answer within " + std::to_string(options_.command_timeout.count()) +
           " ms; the controller must be reset");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  const CompletionEntry entry = cq[admin_head_];
  admin_head_ = (admin_head_ + 1) % kAdminEntries;
  admin_phase_ = static_cast<uint16_t>(admin_phase_ ^ (admin_head_ == 0 ? 1 : 0));
  write32(cq_doorbell(0, capability_.doorbell_stride), admin_head_);
  if (identifier_of(entry) != admin_identifier_) {
    fail(port_->name() + ": " + what + ": the answer belongs to command " + std::to_string(identifier_of(entry)) +
         ", not " + std::to_string(admin_identifier_));
  }
  if (const uint16_t code = code_of(entry); code != kSuccess) {
    fail(port_->name() + ": " + what + ": refused with NVMe status " + hex(code));
  }
  return entry;
}

void UserController::identify() {
  const uint8_t* data = admin_memory_.at() + kAdminData;
  const uint64_t address = admin_memory_.device(kAdminData);
  admin(identify_command(0, 0, 1, address), "Identify Controller");
  identity_ = parse_controller(data, capability_.least_page);
  serial_ = text_of(data + 4, 20);
  model_ = text_of(data + 24, 40);
  volatile_cache_ = (data[525] & 1) != 0;
  if (options_.nsid == 0 || options_.nsid > identity_.namespaces) {
    fail(port_->name() + ": namespace " + std::to_string(options_.nsid) + " of " +
         std::to_string(identity_.namespaces));
  }
  admin(identify_command(0, options_.nsid, 0, address), "Identify Namespace");
  namespace_ = parse_namespace(data);
  if (namespace_.blocks == 0 || namespace_.metadata_bytes != 0 || namespace_.block_bytes < 512 ||
      namespace_.block_bytes > kPage) {
    fail(port_->name() + ": namespace " + std::to_string(options_.nsid) + " has " + std::to_string(namespace_.blocks) +
         " blocks of " + std::to_string(namespace_.block_bytes) + " bytes and " +
         std::to_string(namespace_.metadata_bytes) +
         " of metadata; blocks of 512 to 4096 bytes without metadata are needed (nvme format)");
  }
  granted_ = std::min<uint32_t>(
      granted_pairs(admin(set_queues_command(0, std::max<uint16_t>(options_.queue_pairs, 1)), "Set Features").dw0),
      std::max<uint16_t>(options_.queue_pairs, 1));
}

// --- I/O queue pairs ---

QueuePair UserController::create_queue_pair(uint32_t entries) {
  if (!started_) {
    fail(port_->name() + " is stopped");
  }
  if (entries < 2 || entries > capability_.largest_queue) {
    fail(port_->name() + ": a queue has 2 to " + std::to_string(capability_.largest_queue) + " entries, not " +
         std::to_string(entries));
  }
  uint16_t id = 1;
  while (std::any_of(queues_.begin(), queues_.end(), [id](const auto& queue) { return queue->id == id; })) {
    ++id;
  }
  if (id > granted_) {
    fail(port_->name() + ": all " + std::to_string(granted_) + " queue pairs that the controller granted are in use");
  }
  const uint64_t cq_at = round_up(entries * sizeof(SubmissionEntry), kPage);
  const uint64_t scratch_at = cq_at + round_up(entries * sizeof(CompletionEntry), kPage);
  auto queue = std::make_unique<Queue>();
  queue->id = id;
  queue->memory = space_->allocate(scratch_at + entries * kPage, options_.pages);  // zeroed
  const DmaRegion& memory = queue->memory.region();
  if (!memory.contiguous(0, entries * sizeof(SubmissionEntry)) ||
      !memory.contiguous(cq_at, entries * sizeof(CompletionEntry))) {
    fail(port_->name() + ": a queue of " + std::to_string(entries) +
         " entries needs contiguous memory: set 2 MiB pages aside, or use at most 64 entries");
  }
  queue->scratch.reserve(entries);
  for (uint32_t i = 0; i < entries; ++i) {
    queue->scratch.push_back(
        {reinterpret_cast<uint64_t*>(memory.at + scratch_at + i * kPage), memory.device(scratch_at + i * kPage)});
  }

  queues_.push_back(std::move(queue));  // from here on the device may know the memory
  Queue& made = *queues_.back();
  admin(create_cq_command(0, id, entries, memory.device(cq_at)), "Create I/O Completion Queue");
  admin(create_sq_command(0, id, entries, memory.device(0), id), "Create I/O Submission Queue");

  const uint64_t by_pointer = pointer_ == DataPointer::Prp ? uint64_t{kPrpEntries} * kPrpPageBytes : uint64_t{1} << 30;
  const uint64_t by_device = identity_.largest_transfer == 0 ? by_pointer : identity_.largest_transfer;
  QueuePair pair;
  pair.sq = reinterpret_cast<SubmissionEntry*>(memory.at);
  pair.cq = reinterpret_cast<CompletionEntry*>(memory.at + cq_at);
  pair.sq_doorbell = reinterpret_cast<uint32_t*>(port_->registers() + sq_doorbell(id, capability_.doorbell_stride));
  pair.cq_doorbell = reinterpret_cast<uint32_t*>(port_->registers() + cq_doorbell(id, capability_.doorbell_stride));
  pair.scratch = made.scratch.data();
  pair.entries = entries;
  pair.nsid = options_.nsid;
  pair.block_bytes = namespace_.block_bytes;
  pair.largest_transfer =
      static_cast<uint32_t>(std::min({by_device, by_pointer, uint64_t{65536} * namespace_.block_bytes}));
  pair.id = id;
  pair.pointer = pointer_;
  return pair;
}

DmaMemory UserController::delete_queue_pair(uint16_t id) {
  if (!started_) {
    fail(port_->name() + " is stopped");
  }
  const auto found = std::find_if(queues_.begin(), queues_.end(), [id](const auto& queue) { return queue->id == id; });
  if (found == queues_.end()) {
    fail(port_->name() + ": there is no queue pair " + std::to_string(id));
  }
  admin(delete_queue_command(0, true, id), "Delete I/O Submission Queue");
  admin(delete_queue_command(0, false, id), "Delete I/O Completion Queue");
  DmaMemory memory = std::move((*found)->memory);
  queues_.erase(found);
  return memory;
}

// --- SGL ---

void UserController::probe_sgl() {
  pointer_ = DataPointer::Prp;
  if (!options_.allow_sgl) {
    no_sgl_reason_ = "switched off by the options";
  } else if (identity_.sgl == SglSupport::None) {
    no_sgl_reason_ = "the controller doesn't have it (SGLS 0)";
  } else {
    no_sgl_reason_ = try_sgl();
  }
  pointer_ = no_sgl_reason_.empty() ? DataPointer::Sgl : DataPointer::Prp;
}

// Reads the first blocks by PRP and by each form of SGL and compares: some controllers claim what they can't do.
// Returns why SGL is not to be used, or nothing.
std::string UserController::try_sgl() {
  const uint32_t blocks_per_page = static_cast<uint32_t>(kPage) / namespace_.block_bytes;
  if (namespace_.blocks < uint64_t{2} * blocks_per_page) {
    return "the namespace is too small to try it";
  }
  auto* const entries = reinterpret_cast<DataDescriptor*>(admin_memory_.at() + kProbeTable);
  for (uint64_t i = 0; i < kProbePages; ++i) {
    entries[i] = sgl(kSglDataBlock, admin_memory_.device(kProbeData + i * kPage), static_cast<uint32_t>(kPage));
  }
  uint8_t* const data = admin_memory_.at() + kProbeData;
  const P2pRange range{reinterpret_cast<uint64_t>(data), entries, admin_memory_.device(kProbeTable), kProbePages,
                       static_cast<uint32_t>(kPage)};
  std::memset(data, 0xA5, 2 * kPage);  // different before, so equal after only if both were written
  std::memset(data + 2 * kPage, 0x5A, (kProbePages - 2) * kPage);

  QueuePair pair = create_queue_pair(8);
  const auto deadline = Clock::now() + options_.command_timeout;
  CommandResult by_prp;
  std::array<CommandResult, 3> by_sgl;
  bool answered = true;
  {
    QueueIssuer prp(pair);
    const Command reference{kOpRead, 0, 2 * blocks_per_page, &range, range.base};
    prp.run(&reference, &by_prp, 1, deadline);
    answered = !prp.quarantined();
  }
  if (answered) {
    delete_queue_pair(pair.id);  // a fresh pair, since an issuer begins at the start of its queue
    pair = create_queue_pair(8);
    pair.pointer = DataPointer::Sgl;
    QueueIssuer sgl_issuer(pair);
    const std::array<Command, 3> commands = {{
        {kOpRead, 0, 2 * blocks_per_page, &range, range.base + 2 * kPage},          // a segment in the table
        {kOpRead, 0, blocks_per_page, &range, range.base + 4 * kPage},              // the descriptor inline
        {kOpRead, 0, blocks_per_page, &range, range.base + 5 * kPage + kPage / 2},  // a segment in the scratch page
    }};
    sgl_issuer.run(commands.data(), by_sgl.data(), static_cast<uint32_t>(commands.size()), deadline);
    answered = !sgl_issuer.quarantined();
  }
  if (!answered) {
    fail(port_->name() + ": reading the first blocks: no answer within " +
         std::to_string(options_.command_timeout.count()) + " ms");
  }
  delete_queue_pair(pair.id);
  if (by_prp.status != Status::Ok) {
    return "it couldn't be tried: reading block 0 failed with NVMe status " + hex(by_prp.code);
  }
  for (const auto& result : by_sgl) {
    if (result.status != Status::Ok) {
      return "SGLS claims it, a read by SGL failed with NVMe status " + hex(result.code);
    }
  }
  if (std::memcmp(data, data + 2 * kPage, 2 * kPage) != 0 || std::memcmp(data, data + 4 * kPage, kPage) != 0 ||
      std::memcmp(data, data + 5 * kPage + kPage / 2, kPage) != 0) {
    return "SGLS claims it, a read by SGL gave other bytes than one by PRP";
  }
  return {};
}

}  // namespace tutti::nvme
