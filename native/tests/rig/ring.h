// The ring of IOCBs on drives of the guest: its issuing warps are threads that write into the drives' own queues. What
// the cases share: a tensor stripe of objects, given to the ring and compared.
#pragma once

#include <array>
#include <optional>

#include "rig.h"
#include "tutti/gio/drive_controller.h"
#include "tutti/gio/queue.h"
#include "tutti/layout.h"

namespace rig {

namespace gio = tutti::gio;
using tutti::Direction;

constexpr uint64_t kRingArea = 64 * kMiB;  // of the drives, beyond what other cases use
constexpr uint64_t kRingStep = 4 * kMiB;   // an area of one case
constexpr uint32_t kIssuers = 2;
constexpr uint32_t kObjectBytes = 96 * kKiB;  // 1.5 large pages
constexpr uint32_t kObjects = 21;             // 3 slots of 7
// Between objects in the engine's memory: every other one begins inside a page, and nobody may write into the gaps.
constexpr uint64_t kStride = kObjectBytes + 2 * kKiB;

struct Shape {
  std::vector<std::string> drives = {"0"};
  bool bounce = false;
  std::vector<bool> sgl = {true, true};  // by drive
  bool peer = false;                     // the engine's memory is another device's BAR
  uint64_t area = kRingArea;
  uint32_t payload_bytes = kObjectBytes;
  std::chrono::milliseconds command_timeout{20000};
  std::chrono::milliseconds admin_timeout{5000};
  std::optional<uint32_t> deaf_pair;  // whose doorbell the drive doesn't hear
};

class Ring {
 public:
  Ring(const Context& context, const Shape& shape);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // An IOCB of objects [first, first + count), and its end; statuses lie in `statuses` then.
  tutti::Iocb* give(Direction direction, uint32_t first, uint32_t count);
  tutti::Cqe wait(tutti::Iocb* iocb);
  tutti::Cqe run(Direction direction, uint32_t first, uint32_t count) { return wait(give(direction, first, count)); }
  void answer_quarantine();

  // Writes all objects, reads them back, compares bytes, sums and gaps.
  void there_and_back();
  [[nodiscard]] uint8_t* object(uint32_t i) const { return memory_ + i * kStride; }
  void forget();  // 0xEE everywhere
  [[nodiscard]] bool holds(uint32_t i) const;
  [[nodiscard]] uint32_t count(Status status) const;  // contexts of the last IOCB that ended so

  [[nodiscard]] tutti::Address address(uint32_t i) const { return layout_.address(i / 7, i / 7 % 2, i % 7); }
  static tutti::Layout layout(size_t drives, uint64_t area);
  static uint64_t salt(uint64_t area, uint32_t i) { return area + i; }

  std::vector<uint64_t> sums = std::vector<uint64_t>(kObjects);
  std::vector<uint8_t> statuses;
  std::vector<uint32_t> retired;  // pairs, in order
  std::shared_ptr<nvme::DmaSpace> space;
  std::vector<std::shared_ptr<nvme::PciDevice>> devices;
  std::unique_ptr<gio::Accelerator> accelerator;
  std::unique_ptr<gio::Queue> queue;
  std::unique_ptr<gio::DriveController> drives;  // before the ring and its memory go

 private:
  const Shape shape_;
  const tutti::Layout layout_;
  std::unique_ptr<nvme::PeerBar> bar_;
  uint8_t* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  uint32_t unheard_ = 0;  // a doorbell that is no drive's
};

// Through the kernel: that everything there_and_back() has written is on the drives.
void ring_by_kernel(const Context& context, const std::vector<std::string>& drives, uint64_t area,
                    uint32_t payload_bytes);

}  // namespace rig
