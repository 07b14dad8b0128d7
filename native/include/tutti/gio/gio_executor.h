// The executor whose bytes are moved by the I/O kernel: plans go into IOCBs, the kernel issues and moves, checks and
// makes the checksums, and one thread here feeds it and hands its completions to the plans. Per object the CPU writes
// 32 bytes of context and one sum, and no byte of the data.
//
// `uring-gpu`: the kernel's commands are served by a FileController (io_uring or plain calls into pinned slots). The
// same executor with threads in the place of the GPU (`gio-threads`) moves host tensors: for tests. `nvme-model`: the
// data go straight between the engine's memory and a model of NVMe controllers whose namespaces are the device files,
// mapped. With `drives`, threads write into the queues of NVMe drives of the userspace driver; the device files are not
// used.
//
// Invariants: what the kernel or a drive can still touch keeps its plan undrained; when the GPU has failed for good,
// every plan ends as DeviceError, also those that come after.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "tutti/executor.h"
#include "tutti/gio/drive_controller.h"
#include "tutti/gio/file_controller.h"
#include "tutti/gio/queue.h"

namespace tutti::gio {

struct GioOptions {
  bool cuda = false;  // else threads
  int device = 0;
  uint64_t stream = 0;                                 // CUstream of the I/O domain; 0 = one of its own
  bool model = false;                                  // commands go to the controller model instead of files
  nvme::DataPointer pointer = nvme::DataPointer::Sgl;  // of the model's commands
  // Gives the drives, one per device, each with a pair for every issuing warp. Called once, by start(); host memory
  // only.
  std::function<std::unique_ptr<DriveController>(uint32_t issuers)> drives;
  bool uring = true;                            // how files are read: io_uring, or plain calls
  uint32_t threads = 4;                         // that serve files
  uint32_t depth = 64;                          // operations in flight per thread
  uint64_t pinned_bytes = uint64_t{256} << 20;  // most that rings and slots may pin
  QueueOptions queue;
};

class GioExecutor : public Executor {
 public:
  GioExecutor(Layout layout, std::vector<DeviceFile> devices, GioOptions options, const SlotTable* table,
              FaultInjector* faults);
  ~GioExecutor() override;

  [[nodiscard]] uint64_t pinned_bytes() const noexcept;

 private:
  void start_workers() override;
  void join_workers() override;
  Iocb* obtain() noexcept override;
  void issue(Iocb& iocb, Plan& plan) noexcept override;
  [[nodiscard]] uint32_t contexts_per_iocb(const Plan& plan) const noexcept override;
  uint64_t mark(uint64_t stream) override;
  bool reached(uint64_t ticket) override;

  void run();
  bool take_completions();
  void cancel_ended();
  void answer_quarantine();
  void fail_all(const std::string& why);
  void end_iocb(uint32_t id, const Cqe* cqe);
  void start_files(const QueueOptions& queue);
  void start_model(const QueueOptions& queue);
  void use_drives(QueueOptions& queue, uint32_t issuers);
  void map_for_drives();

  const GioOptions options_;
  std::unique_ptr<Accelerator> accelerator_;
  std::unique_ptr<Queue> queue_;
  std::unique_ptr<nvme::SoftController> controller_;  // or
  std::unique_ptr<DriveController> drives_;
  std::vector<std::pair<unsigned char*, uint64_t>> images_;  // mapped device files, of the model
  std::vector<Iocb*> running_;                               // by id; null when free
  bool broken_ = false;                                      // the GPU is gone for good
  std::thread driver_;
};

}  // namespace tutti::gio
