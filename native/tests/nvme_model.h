// An NVMe controller in software: registers in memory that a thread watches, admin and I/O queues, one namespace in a
// vector. Device addresses are the process's own (DmaSpace::identity). For tests of the driver where there is no PCI;
// the switches make it misbehave.
#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tutti/nvme/controller_port.h"
#include "tutti/nvme/queue_pair.h"

namespace tutti::testing {

namespace nvme = tutti::nvme;

class ModelController final : public nvme::ControllerPort {
 public:
  static constexpr uint32_t kBlock = 512;
  static constexpr uint64_t kRegisterBytes = 0x4000;

  struct Switches {
    std::atomic<bool> never_ready{false};  // ignores CC.EN
    std::atomic<bool> never_stops{false};  // CSTS.RDY stays 1 until the function is reset
    std::atomic<bool> fatal_on_enable{false};
    std::atomic<bool> hold_io{false};     // takes I/O commands, answers none
    std::atomic<bool> mute_admin{false};  // answers no admin command
    std::atomic<bool> wrong_identifier{false};
    std::atomic<bool> sgl_gives_other_bytes{false};
    std::atomic<bool> refuses_sgl{false};
    std::atomic<uint8_t> sgls{1};
    std::atomic<uint64_t> bad_lba{UINT64_MAX};
  };

  explicit ModelController(uint64_t blocks) : data_(blocks * kBlock) {
    for (uint64_t i = 0; i < data_.size(); ++i) {
      data_[i] = static_cast<uint8_t>(i * 131 + i / kBlock * 7);
    }
    registers_ =
        static_cast<uint8_t*>(mmap(nullptr, kRegisterBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (registers_ == MAP_FAILED) {
      throw std::runtime_error("no memory for the model's registers");
    }
    // 64 entries, contiguous, TO 500 ms, NVM command set.
    put(nvme::kRegCap, 63U | 1U << 16 | 1U << 24);
    put(nvme::kRegCap + 4, 1U << 5);
    thread_ = std::thread([this] { serve(); });
  }
  ~ModelController() override {
    stop_.store(true);
    thread_.join();
    munmap(registers_, kRegisterBytes);
  }
  ModelController(const ModelController&) = delete;
  ModelController& operator=(const ModelController&) = delete;

  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] uint8_t* registers() const noexcept override { return registers_; }
  [[nodiscard]] uint64_t register_bytes() const noexcept override { return kRegisterBytes; }
  void set_bus_master(bool on) override { bus_master_.store(on); }
  bool reset_function() noexcept override {
    resets_.fetch_add(1);
    switches.never_stops.store(false);
    return true;
  }

  Switches switches;
  [[nodiscard]] bool bus_master() const { return bus_master_.load(); }
  [[nodiscard]] int function_resets() const { return resets_.load(); }
  [[nodiscard]] bool shut_down_in_order() const { return shut_down_.load(); }
  [[nodiscard]] int dma_while_off() const { return dma_while_off_.load(); }
  // For the test's thread only while no I/O runs.
  std::vector<uint8_t>& data() { return data_; }
  void break_fatally() { broken_.store(true); }

 private:
  struct Queue {
    uint64_t sq = 0, cq = 0;
    uint32_t sq_entries = 0, cq_entries = 0, head = 0, tail = 0;
    uint16_t phase = 1;
  };

  uint32_t get(uint64_t at) const { return load_acquire(reinterpret_cast<uint32_t*>(registers_ + at)); }
  void put(uint64_t at, uint32_t value) { store_release(reinterpret_cast<uint32_t*>(registers_ + at), value); }
  uint64_t get64(uint64_t at) const { return get(at) | static_cast<uint64_t>(get(at + 4)) << 32; }

  void serve() {
    while (!stop_.load()) {
      const uint32_t configuration = get(nvme::kRegConfiguration);
      const bool enabled = (configuration & 1) != 0;
      uint32_t status = get(nvme::kRegStatus);
      if (broken_.load()) {
        put(nvme::kRegStatus, status | nvme::kStatusFatal);
      } else if (enabled && (status & 1) == 0 && !switches.never_ready.load()) {
        start(configuration);
      } else if (!enabled && (status & 3) != 0 && !switches.never_stops.load()) {
        queues_.clear();
        for (uint64_t at = 0x1000; at < kRegisterBytes; at += 4) {
          put(at, 0);  // doorbells
        }
        put(nvme::kRegStatus, 0);
      } else if (enabled && (configuration >> 14 & 3) != 0 && (status >> 2 & 3) == 0) {
        shut_down_.store(true);
        put(nvme::kRegStatus, status | 2U << 2);
      } else if ((status & 1) != 0) {
        for (auto& [id, queue] : queues_) {
          if (serve_queue(id, queue)) {
            break;  // the map has changed
          }
        }
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  void start(uint32_t) {
    if (switches.fatal_on_enable.load()) {
      put(nvme::kRegStatus, nvme::kStatusFatal);
      return;
    }
    const uint32_t attributes = get(nvme::kRegAdminQueues);
    Queue admin;
    admin.sq = get64(nvme::kRegAdminSq);
    admin.cq = get64(nvme::kRegAdminCq);
    admin.sq_entries = (attributes & 0xFFF) + 1;
    admin.cq_entries = (attributes >> 16 & 0xFFF) + 1;
    queues_[0] = admin;
    put(nvme::kRegStatus, nvme::kStatusReady);
  }

  bool serve_queue(uint16_t id, Queue& queue) {
    while (queue.head != get(nvme::sq_doorbell(id, 4))) {
      if (id != 0 && switches.hold_io.load()) {
        return false;
      }
      if (!bus_master_.load()) {
        dma_while_off_.fetch_add(1);
        return false;
      }
      const auto command = reinterpret_cast<const nvme::SubmissionEntry*>(queue.sq)[queue.head];
      queue.head = (queue.head + 1) % queue.sq_entries;
      if (id == 0 && switches.mute_admin.load()) {
        continue;
      }
      uint32_t dw0 = 0;
      const size_t before = queues_.size();
      const uint16_t code = id == 0 ? admin(command, dw0) : transfer(command);
      auto* const entry = &reinterpret_cast<nvme::CompletionEntry*>(queue.cq)[queue.tail];
      entry->dw0 = dw0;
      entry->sq = queue.head | static_cast<uint32_t>(id) << 16;
      const auto identifier =
          static_cast<uint16_t>(nvme::identifier_of(command) + (switches.wrong_identifier.load() ? 99 : 0));
      const uint16_t phase = queue.phase;
      queue.tail = (queue.tail + 1) % queue.cq_entries;
      if (queue.tail == 0) {
        queue.phase ^= 1;
      }
      store_release(&entry->status, nvme::completion_word(identifier, phase, code));
      if (queues_.size() != before) {
        return true;
      }
    }
    return false;
  }

  uint16_t admin(const nvme::SubmissionEntry& command, uint32_t& dw0) {
    auto* const page = reinterpret_cast<uint8_t*>(command.dptr_lo);
    const auto id = static_cast<uint16_t>(command.cdw10);
    switch (nvme::opcode_of(command)) {
      case nvme::kAdminIdentify:
        std::memset(page, 0, 4096);
        if (command.cdw10 == 1) {
          std::memcpy(page + 4, "MODEL-1             ", 20);
          std::memcpy(page + 24, "software controller                     ", 40);
          page[77] = 5;  // 128 KiB
          page[516] = 1;
          page[525] = 1;
          page[536] = switches.sgls.load();
        } else {
          const uint64_t blocks = data_.size() / kBlock;
          std::memcpy(page, &blocks, 8);
          page[128 + 2] = 9;
        }
        return nvme::kSuccess;
      case nvme::kAdminSetFeatures:
        dw0 = 3U | 3U << 16;  // four pairs
        return nvme::kSuccess;
      case nvme::kAdminCreateCq:
        made_[id].cq = command.dptr_lo;
        made_[id].cq_entries = (command.cdw10 >> 16) + 1;
        return nvme::kSuccess;
      case nvme::kAdminCreateSq: {
        Queue queue = made_[id];
        queue.sq = command.dptr_lo;
        queue.sq_entries = (command.cdw10 >> 16) + 1;
        put(nvme::sq_doorbell(id, 4), 0);
        put(nvme::cq_doorbell(id, 4), 0);
        queues_[id] = queue;
        return nvme::kSuccess;
      }
      case nvme::kAdminDeleteSq:
        return queues_.erase(id) == 1 ? nvme::kSuccess : nvme::kInvalidField;
      case nvme::kAdminDeleteCq:
        made_.erase(id);
        return nvme::kSuccess;
      default:
        return nvme::kInvalidOpcode;
    }
  }

  // Calls `part(address, bytes)` for each piece of the command's memory, as the specifications describe it.
  static void pieces(const nvme::SubmissionEntry& command, uint64_t bytes,
                     const std::function<void(uint64_t, uint64_t)>& part) {
    const nvme::DataDescriptor first{command.dptr_lo, command.dptr_hi};
    if (nvme::pointer_of(command) == nvme::DataPointer::Sgl) {
      if (nvme::sgl_identifier(first) == nvme::kSglDataBlock) {
        part(first.lo, nvme::sgl_bytes(first));
        return;
      }
      const auto* entry = reinterpret_cast<const nvme::DataDescriptor*>(first.lo);
      for (uint32_t i = 0; i < nvme::sgl_bytes(first) / 16; ++i) {
        part(entry[i].lo, nvme::sgl_bytes(entry[i]));
      }
      return;
    }
    const uint64_t room = 4096 - first.lo % 4096;
    part(first.lo, std::min(room, bytes));
    if (bytes <= room) {
      return;
    }
    bytes -= room;
    if (bytes <= 4096) {
      part(first.hi, bytes);
      return;
    }
    for (const auto* list = reinterpret_cast<const uint64_t*>(first.hi); bytes != 0; ++list) {
      const uint64_t now = std::min<uint64_t>(bytes, 4096);
      part(*list, now);
      bytes -= now;
    }
  }

  uint16_t transfer(const nvme::SubmissionEntry& command) {
    const uint8_t opcode = nvme::opcode_of(command);
    if (opcode == nvme::kOpFlush) {
      return nvme::kSuccess;
    }
    const uint64_t lba = nvme::lba_of(command);
    const uint64_t bytes = uint64_t{nvme::blocks_of(command)} * kBlock;
    const bool by_sgl = nvme::pointer_of(command) == nvme::DataPointer::Sgl;
    if (by_sgl && switches.refuses_sgl.load()) {
      return nvme::kInvalidField;
    }
    if ((lba * kBlock) + bytes > data_.size()) {
      return nvme::kLbaOutOfRange;
    }
    if (const uint64_t bad = switches.bad_lba.load(); bad >= lba && bad < lba + bytes / kBlock) {
      return nvme::kUnrecoveredReadError;
    }
    uint8_t* at = data_.data() + lba * kBlock;
    uint64_t total = 0;
    pieces(command, bytes, [&](uint64_t address, uint64_t length) {
      auto* const memory = reinterpret_cast<uint8_t*>(address);
      opcode == nvme::kOpWrite ? std::memcpy(at + total, memory, length) : std::memcpy(memory, at + total, length);
      if (opcode == nvme::kOpRead && by_sgl && switches.sgl_gives_other_bytes.load()) {
        memory[length / 2] ^= 1;
      }
      total += length;
    });
    return total == bytes ? nvme::kSuccess : nvme::kSglLengthInvalid;
  }

  std::string name_ = "model";
  uint8_t* registers_ = nullptr;
  std::vector<uint8_t> data_;
  std::map<uint16_t, Queue> queues_;
  std::map<uint16_t, Queue> made_;  // completion queues without their submission queue yet
  std::atomic<bool> stop_{false}, bus_master_{false}, shut_down_{false}, broken_{false};
  std::atomic<int> resets_{0}, dma_while_off_{0};
  std::thread thread_;
};

}  // namespace tutti::testing
