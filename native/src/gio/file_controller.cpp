#include "tutti/gio/file_controller.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <optional>
#include <system_error>

#include "tutti/executor.h"
#include "tutti/uring.h"

namespace tutti::gio {
namespace {

constexpr uint32_t kRetries = 64;
constexpr std::chrono::minutes kLongestSleep{10};
constexpr uint32_t kSpins = 2000;  // empty looks at the doorbells before the processor is offered to others
constexpr uint32_t kBatch = 8;     // operations prepared before the kernel is told

struct Operation {
  nvme::ServedCommand command;
  uint64_t bytes = 0;
  uint64_t offset = 0;
  int file = -1;
  uint32_t device = 0;
  bool write = false;
  uint32_t retries = 0;
  Fault fault{};
  uint64_t hung_since = 0;
  std::vector<iovec> memory;
};

}  // namespace

// One thread's work.
class FileController::Lane {
 public:
  Lane(FileController& owner, uint32_t thread) : owner_(owner), options_(owner.options_) {
    // Threads of one group share its pairs; with fewer threads than groups, a thread has several groups.
    const uint32_t groups = std::min(options_.groups, options_.threads);
    const uint32_t mine = thread % groups;
    const uint32_t sharing = (options_.threads - mine + groups - 1) / groups;
    for (uint32_t i = 0; i < owner.queues_.size(); ++i) {
      if (i % options_.groups % groups == mine && i / options_.groups % sharing == thread / groups) {
        server_.add(owner.queues_[i]);
      }
    }
    operations_.resize(options_.uring ? options_.depth : 1);
    for (uint32_t id = static_cast<uint32_t>(operations_.size()); id > 0; --id) {
      operations_[id - 1].memory.reserve(8);
      free_.push_back(id - 1);
    }
    if (options_.uring) {
      ring_.emplace(options_.depth);
      fixed_files_ = ring_->register_files(options_.files) >= 0;
      fixed_buffers_ = options_.memory.second > options_.memory.first &&
                       options_.memory.second - options_.memory.first <= (uint64_t{1} << 30) &&
                       ring_->register_buffers({options_.memory}) >= 0;
    }
  }

  [[nodiscard]] bool fixed_buffers() const noexcept { return fixed_buffers_; }

  // Looks once. Returns whether there was anything.
  bool turn() {
    bool any = false;
    while (!free_.empty()) {
      const uint32_t id = free_.back();
      Operation& operation = operations_[id];
      if (!server_.fetch(operation.command)) {
        break;
      }
      any = true;
      free_.pop_back();
      if (const uint16_t code = prepare(operation); code != nvme::kSuccess) {
        end(id, code);
      } else if (operation.fault.kind == FaultKind::Hang) {
        operation.hung_since = owner_.faults_->releases();
        hung_.push_back(id);
        if (free_.empty() && !options_.uring) {  // a lane of one operation goes on with another
          operations_.emplace_back();
          free_.push_back(static_cast<uint32_t>(operations_.size() - 1));
        }
      } else if (!ring_) {
        end(id, result_code(operation, move(operation)));
      } else {
        enqueue(id);
        if (ring_->unsubmitted() >= kBatch) {
          ring_->submit(0, 0);
        }
      }
    }
    if (ring_) {
      if (ring_->unsubmitted() != 0) {
        ring_->submit(0, 0);
      }
      any |= ring_->reap([this](uint64_t tag, int64_t result) {
        const auto id = static_cast<uint32_t>(tag);
        Operation& operation = operations_[id];
        if ((result == -EAGAIN || result == -EINTR) && operation.retries++ < kRetries) {
          enqueue(id);
          return;
        }
        end(id, result_code(operation, result));
      }) != 0;
    }
    for (size_t i = 0; i < hung_.size();) {
      const uint32_t id = hung_[i];
      if (owner_.faults_->releases() != operations_[id].hung_since) {
        hung_.erase(hung_.begin() + static_cast<ptrdiff_t>(i));
        end(id, nvme::code_of_status(Status::Cancelled));
      } else {
        ++i;
      }
    }
    return any;
  }

  [[nodiscard]] bool in_flight() const noexcept { return free_.size() + hung_.size() < operations_.size(); }
  void wait() {
    if (ring_ && in_flight()) {
      ring_->submit(1, 1'000'000);
    }
  }

 private:
  uint16_t prepare(Operation& operation) {
    const nvme::SubmissionEntry& entry = operation.command.entry;
    const uint8_t opcode = nvme::opcode_of(entry);
    if (opcode != nvme::kOpRead && opcode != nvme::kOpWrite) {
      return nvme::kInvalidOpcode;
    }
    if (entry.nsid == 0 || entry.nsid > options_.files.size()) {
      return nvme::kInvalidNamespace;
    }
    operation.device = entry.nsid - 1;
    operation.file = options_.files[operation.device];
    operation.write = opcode == nvme::kOpWrite;
    operation.bytes = uint64_t{nvme::blocks_of(entry)} * options_.logical_block_bytes;
    operation.offset = nvme::lba_of(entry) * options_.logical_block_bytes;
    operation.retries = 0;
    operation.fault = {};
    segments_.clear();
    if (const uint16_t code = nvme::walk_data(entry, operation.bytes, nvme::AddressSpace::identity(), segments_);
        code != nvme::kSuccess) {
      return code;
    }
    operation.memory.clear();
    for (const auto& segment : segments_) {
      operation.memory.push_back({reinterpret_cast<void*>(segment.address), segment.bytes});
    }
    if (owner_.faults_ != nullptr) {
      operation.fault = owner_.faults_->decide(operation.write ? Direction::Write : Direction::Read, operation.device);
      if (operation.fault.kind == FaultKind::Corrupt && operation.write) {
        flip_bit(static_cast<unsigned char*>(operation.memory[0].iov_base), operation.memory[0].iov_len,
                 operation.fault.seed);
      } else if (operation.fault.kind == FaultKind::Error || operation.fault.kind == FaultKind::Short) {
        operation.memory.resize(1);
        operation.memory[0].iov_len =
            operation.memory[0].iov_len / 2 / options_.logical_block_bytes * options_.logical_block_bytes;
      }
    }
    return nvme::kSuccess;
  }

  static int64_t move(const Operation& operation) noexcept {
    const auto offset = static_cast<off_t>(operation.offset);
    const int parts = static_cast<int>(operation.memory.size());
    for (uint32_t attempt = 0;; ++attempt) {
      const ssize_t result = operation.write ? pwritev2(operation.file, operation.memory.data(), parts, offset, 0)
                                             : preadv2(operation.file, operation.memory.data(), parts, offset, 0);
      if (result >= 0) {
        return result;
      }
      if ((errno != EAGAIN && errno != EINTR) || attempt >= kRetries) {
        return -errno;
      }
    }
  }

  void enqueue(uint32_t id) {
    Operation& operation = operations_[id];
    io_uring_sqe* sqe = ring_->get_sqe();
    while (sqe == nullptr) {
      ring_->submit(0, 0);
      sqe = ring_->get_sqe();
    }
    const bool one = operation.memory.size() == 1;
    const bool fixed = one && fixed_buffers_;
    if (fixed) {
      sqe->opcode = operation.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    } else if (one) {
      sqe->opcode = operation.write ? IORING_OP_WRITE : IORING_OP_READ;
    } else {
      sqe->opcode = operation.write ? IORING_OP_WRITEV : IORING_OP_READV;
    }
    if (fixed_files_) {
      sqe->flags = IOSQE_FIXED_FILE;
      sqe->fd = static_cast<int32_t>(operation.device);
    } else {
      sqe->fd = operation.file;
    }
    sqe->addr = one ? reinterpret_cast<uint64_t>(operation.memory[0].iov_base)
                    : reinterpret_cast<uint64_t>(operation.memory.data());
    sqe->len =
        one ? static_cast<uint32_t>(operation.memory[0].iov_len) : static_cast<uint32_t>(operation.memory.size());
    sqe->off = operation.offset;
    sqe->user_data = id;
  }

  static uint16_t result_code(const Operation& operation, int64_t result) noexcept {
    Status status = status_of_result(result, operation.bytes);
    if (operation.fault.kind == FaultKind::Error) {
      status = status_of_result(-operation.fault.error, operation.bytes);
    } else if (operation.fault.kind == FaultKind::Short) {
      status = Status::ShortIo;
    } else if (operation.fault.kind == FaultKind::Corrupt && !operation.write && status == Status::Ok) {
      flip_bit(static_cast<unsigned char*>(operation.memory[0].iov_base), operation.memory[0].iov_len,
               operation.fault.seed);
    }
    return nvme::code_of_status(status);
  }

  void end(uint32_t id, uint16_t code) {
    const nvme::ServedCommand& command = operations_[id].command;
    while (!server_.complete(command.queue, nvme::identifier_of(command.entry), code)) {
      std::this_thread::yield();
    }
    free_.push_back(id);
  }

  FileController& owner_;
  const FileControllerOptions& options_;
  nvme::QueueServer server_;
  std::optional<Uring> ring_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> hung_;
  std::vector<nvme::Segment> segments_;
  bool fixed_files_ = false;
  bool fixed_buffers_ = false;
};

FileController::FileController(std::vector<nvme::ServedQueue> queues, FileControllerOptions options,
                               FaultInjector* faults)
    : queues_(std::move(queues)), options_(std::move(options)), faults_(faults) {
  std::vector<std::future<void>> ready;
  std::exception_ptr failure;
  try {
    for (uint32_t thread = 0; thread < options_.threads; ++thread) {
      auto started = std::make_shared<std::promise<void>>();
      ready.push_back(started->get_future());
      threads_.emplace_back([this, thread, started] {
        std::optional<Lane> lane;
        try {
          lane.emplace(*this, thread);
        } catch (...) {
          started->set_exception(std::current_exception());
          return;
        }
        started->set_value();
        uint32_t empty = 0;
        while (!stopping() || lane->in_flight()) {
          if (lane->turn()) {
            empty = 0;
          } else if (!is_awake() && !lane->in_flight()) {
            wait_awake(kLongestSleep);
          } else if (++empty > kSpins) {
            lane->in_flight() ? lane->wait() : std::this_thread::yield();
          }
        }
      });
    }
  } catch (const std::system_error&) {
    ready.pop_back();
    failure = std::current_exception();
  }
  for (auto& thread : ready) {
    try {
      thread.get();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) {
    stop();
    std::rethrow_exception(failure);
  }
}

FileController::~FileController() { stop(); }

}  // namespace tutti::gio
