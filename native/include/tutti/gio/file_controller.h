// The proxy of uring-gpu: serves the I/O kernel's queue pairs from files, as a drive would from flash. Each thread
// takes the commands of its share of the pairs and moves their bytes between file and bounce slot, by io_uring or by
// preadv2/pwritev2. It sees no object, no checksum and no tensor.
//
// Invariants: a command's completion is posted after its I/O has ended; after stop() nothing touches the slots.
#pragma once

#include <cstdint>
#include <vector>

#include "tutti/fault.h"
#include "tutti/nvme/queue_server.h"
#include "tutti/nvme/soft_controller.h"

namespace tutti::gio {

struct FileControllerOptions {
  std::vector<int> files;  // by namespace - 1; stay the caller's
  uint32_t logical_block_bytes = 512;
  uint32_t threads = 4;
  bool uring = true;    // else preadv2/pwritev2
  uint32_t depth = 64;  // operations in flight per thread (uring)
  uint32_t groups = 1;  // pair i belongs to group i % groups; a thread serves pairs of one, as far as there are threads
  std::pair<uint64_t, uint64_t> memory{0, 0};  // of the slots, to register
};

class FileController : public nvme::SoftController {
 public:
  // `faults` may be null. Starts its threads; throws std::system_error when they can't have what they need.
  FileController(std::vector<nvme::ServedQueue> queues, FileControllerOptions options, FaultInjector* faults);
  ~FileController() override;

  // Nothing to wait for: the proxy's I/O goes into slots, never into the engine's memory, and a slot whose command was
  // given up isn't used again.
  void abort(uint32_t /*queue*/) override {}

 private:
  class Lane;

  const std::vector<nvme::ServedQueue> queues_;
  const FileControllerOptions options_;
  FaultInjector* faults_;
};

}  // namespace tutti::gio
