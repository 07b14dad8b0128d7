// An NVMe controller driven by this process: reset and start, what it says of itself, I/O queue pairs, stop.
//
// Life: stopped -> start() -> ready -> stop() -> stopped; the constructor starts, the destructor shuts down in order.
// stop() is a controller reset: whatever was in flight is dropped, and when it returns nothing arrives in memory any
// more, so that also the memory of quarantined queues is free again.
//
// Invariants: DMA is switched off until the controller is disabled, so that commands of a former owner can't reach
// memory that is somebody else's by now; queue memory is zeroed before use (stale phase bits pass for completions) and
// is freed only after the device confirmed the deletion or the reset, and never under whoever still polls it: a deleted
// pair's memory goes to the caller, that of a stopped controller stays until its next start or its end; every wait is
// bounded, by CAP.TO or by the options. A fatal status (CSTS.CFS) or a device that vanished ends a wait at once. Not
// thread-safe: one thread makes, deletes, starts and stops; queue pairs are driven by a thread each. Source: NVM
// Express Base 2.0c, 3.5 (initialisation), 3.6 (shutdown), 3.7 (reset); mechanism: SGL where the drive has it, else
// PRP.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tutti/nvme/controller_port.h"
#include "tutti/nvme/dma_space.h"
#include "tutti/nvme/queue_pair.h"

namespace tutti::nvme {

struct ControllerOptions {
  uint16_t queue_pairs = 16;  // asked for; the controller may grant fewer
  uint32_t nsid = 1;
  bool allow_sgl = true;
  PageKind pages = PageKind::Huge2M;                // of queues; Base4K bounds a queue to 64 entries under uio
  std::chrono::milliseconds command_timeout{5000};  // of an admin command, and of an orderly shutdown
};

enum class Health : uint8_t { Ready, Stopped, Fatal, Gone };
const char* health_name(Health health) noexcept;

class UserController {
 public:
  UserController(std::shared_ptr<ControllerPort> port, std::shared_ptr<DmaSpace> space, ControllerOptions options);
  ~UserController();
  UserController(const UserController&) = delete;
  UserController& operator=(const UserController&) = delete;

  // 2 to largest_queue() entries, so entries - 1 commands in flight. Valid until deleted or stopped.
  QueuePair create_queue_pair(uint32_t entries);
  // Commands still in flight end without a trace. Returns the pair's memory, for those whose threads may still look at
  // it; else it is dropped at once. Throws if the controller doesn't confirm; the memory is kept then.
  DmaMemory delete_queue_pair(uint16_t id);
  // Every pair is invalid after it; their memory stays mapped until start(), or until the controller object goes.
  void stop();
  // Of a stopped controller. Throws if it doesn't come up; it stays stopped then.
  void start();

  // From the status register, at any time.
  [[nodiscard]] Health health() const noexcept;

  [[nodiscard]] const std::string& serial() const noexcept { return serial_; }
  [[nodiscard]] const std::string& model() const noexcept { return model_; }
  [[nodiscard]] const Capabilities& capability() const noexcept { return capability_; }
  [[nodiscard]] const ControllerIdentity& identity() const noexcept { return identity_; }
  [[nodiscard]] const NamespaceIdentity& name_space() const noexcept { return namespace_; }
  [[nodiscard]] bool volatile_cache() const noexcept { return volatile_cache_; }  // writes are durable after a flush
  [[nodiscard]] uint32_t queue_pairs() const noexcept { return granted_; }
  [[nodiscard]] uint32_t largest_queue() const noexcept { return capability_.largest_queue; }
  // How data is described, and if not by SGL, why.
  [[nodiscard]] DataPointer pointer() const noexcept { return pointer_; }
  [[nodiscard]] const std::string& no_sgl_reason() const noexcept { return no_sgl_reason_; }

 private:
  struct Queue {
    uint16_t id = 0;
    DmaMemory memory;
    std::vector<ScratchPage> scratch;
  };

  [[nodiscard]] uint32_t read32(uint64_t offset) const noexcept;
  void write32(uint64_t offset, uint32_t value) noexcept;
  [[nodiscard]] uint64_t read64(uint64_t offset) const noexcept;
  void write64(uint64_t offset, uint64_t value) noexcept;

  void disable();
  [[nodiscard]] uint32_t ready_bound_ms() const noexcept;
  [[nodiscard]] bool becomes_ready(bool ready) const noexcept;
  void wait_ready(bool ready);
  void shut_down() noexcept;
  CompletionEntry admin(const SubmissionEntry& command, const char* what);
  void identify();
  void probe_sgl();
  std::string try_sgl();

  std::shared_ptr<ControllerPort> port_;
  std::shared_ptr<DmaSpace> space_;
  ControllerOptions options_;
  Capabilities capability_{};
  ControllerIdentity identity_{};
  NamespaceIdentity namespace_{};
  std::string serial_;
  std::string model_;
  bool volatile_cache_ = false;
  uint32_t granted_ = 0;
  DataPointer pointer_ = DataPointer::Prp;
  std::string no_sgl_reason_;
  bool started_ = false;

  DmaMemory admin_memory_;  // submission queue, completion queue, data: a page each; then the pages of the SGL probe
  uint32_t admin_tail_ = 0;
  uint32_t admin_head_ = 0;
  uint16_t admin_phase_ = 1;
  uint16_t admin_identifier_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace tutti::nvme
