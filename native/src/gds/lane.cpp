#include "tutti/gds/lane.h"

#include <algorithm>
#include <ranges>
#include <stdexcept>

#include "cufile_library.h"

namespace tutti {
namespace {

using std::chrono::microseconds;

// How long one call may wait for a batch before the others and the deadlines are looked at.
constexpr microseconds kSlice{1000};

// A cookie tells the run and the entry.
constexpr uint64_t kIndexBits = 8;
static_assert(kMaxGdsBatch <= 1U << kIndexBits);

void* to_cookie(uint64_t run, uint64_t index) noexcept { return reinterpret_cast<void*>(run << kIndexBits | index); }

std::runtime_error failed(const std::string& call, cufile::Error error) {
  return std::runtime_error(call + " failed: " + cufile::error_text(error));
}

}  // namespace

GdsLane::GdsLane(const std::vector<int>& fds, GdsOptions options)
    : options_(std::move(options)), session_(cufile::Session::open(options_.library)) {
  const cufile::Library& library = session_->library();
  const uint32_t allowed = library.max_batch_entries();
  entries_ = std::clamp(options_.batch_entries, 1U, kMaxGdsBatch);
  entries_ = allowed == 0 ? entries_ : std::min(entries_, allowed);
  parameters_.resize(entries_);
  events_.resize(entries_);
  batches_.resize(std::max(options_.batches, 1U));
  ready_.resize(2 * batches_.size() * entries_);
  try {
    for (size_t i = 0; i < fds.size(); ++i) {
      cufile::Handle handle = nullptr;
      if (const auto error = library.register_file(fds[i], handle); error.code != cufile::kSuccess) {
        throw failed("cuFileHandleRegister of file " + std::to_string(i), error);
      }
      files_.push_back(handle);
    }
    for (Batch& batch : batches_) {
      batch.entries.resize(entries_);
      if (const auto error = library.batch_set_up(&batch.handle, entries_); error.code != cufile::kSuccess) {
        batch.handle = nullptr;
        throw failed("cuFileBatchIOSetUp for " + std::to_string(entries_) + " entries", error);
      }
      batch.state = State::Idle;
    }
  } catch (...) {
    close();
    throw;
  }
}

GdsLane::~GdsLane() { close(); }

void GdsLane::register_buffer(uint64_t address, uint64_t bytes) {
  const auto next = std::lower_bound(buffers_.begin(), buffers_.end(), address,
                                     [](const Buffer& buffer, uint64_t at) { return buffer.address < at; });
  const bool reaches_next = next != buffers_.end() && next->address - address < bytes;
  const bool in_previous = next != buffers_.begin() && address - std::prev(next)->address < std::prev(next)->bytes;
  if (closed_ || bytes == 0 || address + bytes < address || reaches_next || in_previous) {
    throw std::invalid_argument("a buffer must have bytes and overlap no other, and the lane must be open");
  }
  buffers_.insert(next, Buffer{address, bytes});
  const auto error = session_->library().buffer_register(reinterpret_cast<const void*>(address), bytes, 0);
  if (error.code != cufile::kSuccess) {
    std::erase_if(buffers_, [&](const Buffer& buffer) { return buffer.address == address; });
    throw failed("cuFileBufRegister of " + std::to_string(bytes) + " bytes", error);
  }
}

const GdsLane::Buffer* GdsLane::buffer_of(const GdsRequest& request) const noexcept {
  const auto next = std::upper_bound(buffers_.begin(), buffers_.end(), request.address,
                                     [](uint64_t at, const Buffer& buffer) { return at < buffer.address; });
  if (next == buffers_.begin()) {
    return nullptr;
  }
  const Buffer& buffer = *std::prev(next);
  const uint64_t inside = request.address - buffer.address;
  return inside < buffer.bytes && request.bytes <= buffer.bytes - inside ? &buffer : nullptr;
}

// Each accepted request may still yield two completions, and one once it was given up.
size_t GdsLane::room() const noexcept {
  return ready_.size() - ready_count_ - 2 * size_t{in_flight_ - unsettled_} - unsettled_;
}

void GdsLane::push(const GdsCompletion& completion) noexcept {
  ready_[(ready_first_ + ready_count_++) % ready_.size()] = completion;
}

GdsLane::Batch* GdsLane::free_batch() noexcept {
  const auto found = std::ranges::find_if(
      batches_, [](const Batch& batch) { return batch.state == State::Idle || batch.state == State::Empty; });
  return found == batches_.end() ? nullptr : &*found;
}

size_t GdsLane::submit(std::span<const GdsRequest> requests, Clock::time_point deadline) noexcept {
  const size_t count = std::min({requests.size(), size_t{entries_}, room() / 2});
  if (count == 0) {
    return 0;
  }
  Batch* batch = closed_ ? nullptr : free_batch();
  if (batch == nullptr) {
    const bool will_be_free = std::ranges::any_of(
        batches_, [](const Batch& other) { return other.state == State::Running || other.state == State::Cancelling; });
    if (will_be_free) {
      return 0;
    }
    // Closed, or every batch was given up: waiting helps nobody.
    for (const GdsRequest& request : requests.first(count)) {
      push({request.tag, closed_ ? Status::BadState : Status::DeviceError, true, 0});
    }
    return count;
  }
  if (const uint32_t valid = fill(*batch, requests.first(count)); valid != 0) {
    start(*batch, valid, deadline);
  }
  return count;
}

uint32_t GdsLane::fill(Batch& batch, std::span<const GdsRequest> requests) noexcept {
  uint32_t filled = 0;
  batch.run = ++runs_;
  for (const GdsRequest& request : requests) {
    const Buffer* buffer = buffer_of(request);
    if (buffer == nullptr || request.file >= files_.size() || request.bytes == 0 ||
        request.offset > static_cast<uint64_t>(INT64_MAX) - request.bytes) {
      push({request.tag, Status::BadState, true, 0});
      continue;
    }
    batch.entries[filled] = {request.tag, request.bytes, true};
    cufile::BatchEntry& entry = parameters_[filled];
    entry.mode = cufile::kBatchMode;
    entry.buffer = reinterpret_cast<void*>(buffer->address);
    entry.buffer_offset = static_cast<off_t>(request.address - buffer->address);
    entry.file_offset = static_cast<off_t>(request.offset);
    entry.bytes = request.bytes;
    entry.file = files_[request.file];
    entry.opcode = request.direction == Direction::Write ? cufile::kOpWrite : cufile::kOpRead;
    entry.cookie = to_cookie(batch.run, filled);
    ++filled;
  }
  batch.left = filled;
  batch.clean = true;
  in_flight_ += filled;
  return filled;
}

void GdsLane::start(Batch& batch, uint32_t count, Clock::time_point deadline) noexcept {
  const cufile::Library& library = session_->library();
  if (batch.handle == nullptr) {
    if (const auto error = library.batch_set_up(&batch.handle, entries_); error.code != cufile::kSuccess) {
      batch.handle = nullptr;
      refuse(batch, error.code);
      return;
    }
  }
  batch.until = deadline;
  const auto error = library.batch_submit(batch.handle, count, parameters_.data(), 0);
  if (error.code == cufile::kSuccess) {
    batch.state = State::Running;
    return;
  }
  // It says that it took none. Should it have taken some, they are cancelled, and what they became is told.
  batch.state = State::Cancelling;
  batch.cause = cufile::status_of_error(error.code);
  library.batch_cancel(batch.handle);
  take_events(batch, microseconds{0});
  refuse(batch, error.code);
  destroy(batch);
}

void GdsLane::refuse(Batch& batch, int code) noexcept {
  for (Entry& entry : batch.entries) {
    if (entry.running) {
      entry.running = false;
      --in_flight_;
      push({entry.tag, cufile::status_of_error(code), true, -int64_t{code}});
    }
  }
  batch.left = 0;
}

bool GdsLane::take_events(Batch& batch, microseconds wait) noexcept {
  auto count = batch.left;
  timespec timeout{wait.count() / 1000000, wait.count() % 1000000 * 1000};
  const auto error =
      session_->library().batch_get_status(batch.handle, wait.count() > 0 ? 1 : 0, &count, events_.data(), &timeout);
  if (error.code != cufile::kSuccess) {
    // What is documented as "retry later" is; the deadline bounds it.
    return cufile::status_of_error(error.code) == Status::Retry;
  }
  for (size_t i = 0; i < std::min<size_t>(count, events_.size()); ++i) {
    finish(batch, events_[i]);
  }
  return true;
}

void GdsLane::finish(Batch& batch, const cufile::BatchEvent& event) noexcept {
  const auto cookie = reinterpret_cast<uint64_t>(event.cookie);
  const uint64_t index = cookie & ((1U << kIndexBits) - 1);
  if (!cufile::is_end(event.status) || cookie >> kIndexBits != batch.run || index >= batch.entries.size() ||
      !batch.entries[index].running) {
    return;  // a progress report, or one told twice
  }
  Entry& entry = batch.entries[index];
  entry.running = false;
  --batch.left;
  --in_flight_;
  Status status = cufile::status_of_event(event, entry.bytes);
  batch.clean = batch.clean && status == Status::Ok;
  if (batch.state == State::Given) {
    --unsettled_;
    status = batch.cause;  // the outcome was told already; this says that its memory is free
  } else if (batch.state == State::Cancelling && status == Status::Cancelled) {
    status = batch.cause;
  }
  push({entry.tag, status, true, static_cast<int64_t>(event.result)});
}

void GdsLane::collect(Batch& batch, microseconds wait) noexcept {
  if (!take_events(batch, wait) && batch.state == State::Running) {
    begin_cancel(batch, Status::DeviceError);
  }
  if (batch.left == 0) {
    if (batch.state == State::Running && batch.clean) {
      batch.state = State::Idle;
    } else {
      destroy(batch);
    }
    return;
  }
  const auto now = options_.now();
  if (batch.state == State::Running && now >= batch.until) {
    begin_cancel(batch, Status::Timeout);
  } else if (batch.state == State::Cancelling && now >= batch.until) {
    give_up(batch);
  }
}

void GdsLane::begin_cancel(Batch& batch, Status cause) noexcept {
  // Its own result changes nothing: what counts is which entries are told as ended.
  session_->library().batch_cancel(batch.handle);
  batch.state = State::Cancelling;
  batch.cause = cause;
  batch.until = options_.now() + options_.cancel_grace;
}

void GdsLane::give_up(Batch& batch) noexcept {
  batch.state = State::Given;
  for (const Entry& entry : batch.entries) {
    if (entry.running) {
      ++unsettled_;
      push({entry.tag, batch.cause, false, 0});
    }
  }
}

void GdsLane::destroy(Batch& batch) noexcept {
  if (batch.handle != nullptr) {
    session_->library().batch_destroy(batch.handle);
  }
  batch.handle = nullptr;
  batch.state = State::Empty;
}

void GdsLane::step() noexcept {
  for (Batch& batch : batches_) {
    if (is_used(batch)) {
      collect(batch, microseconds{0});
    }
  }
}

size_t GdsLane::poll(std::span<GdsCompletion> out, microseconds wait) noexcept {
  if (!closed_) {
    step();
    const auto end = Clock::now() + wait;
    while (ready_count_ == 0 && wait.count() > 0) {
      const auto left = std::chrono::duration_cast<microseconds>(end - Clock::now());
      const auto found = std::ranges::find_if(batches_, [](const Batch& batch) {
        return batch.state == State::Running || batch.state == State::Cancelling;
      });
      if (left.count() <= 0 || found == batches_.end()) {
        break;
      }
      collect(*found, std::min(left, kSlice));
      step();
    }
  }
  const size_t count = std::min(out.size(), ready_count_);
  for (size_t i = 0; i < count; ++i) {
    out[i] = ready_[ready_first_];
    ready_first_ = (ready_first_ + 1) % ready_.size();
  }
  ready_count_ -= count;
  return count;
}

void GdsLane::cancel() noexcept {
  for (Batch& batch : batches_) {
    if (batch.state == State::Running) {
      begin_cancel(batch, Status::Cancelled);
    }
  }
}

bool GdsLane::close() noexcept {
  if (closed_) {
    return unsettled_ == 0;
  }
  cancel();
  const auto end = Clock::now() + options_.cancel_grace;
  for (Batch& batch : batches_) {
    while (batch.state == State::Cancelling && Clock::now() < end) {
      collect(batch, kSlice);
    }
    if (batch.state == State::Cancelling) {
      give_up(batch);
    }
  }
  step();  // what was given up earlier may have ended meanwhile
  closed_ = true;
  for (Batch& batch : batches_) {
    destroy(batch);
  }
  if (unsettled_ != 0) {
    session_->leave_open();
    return false;
  }
  const cufile::Library& library = session_->library();
  for (const Buffer& buffer : std::views::reverse(buffers_)) {
    library.buffer_deregister(reinterpret_cast<const void*>(buffer.address));
  }
  for (cufile::Handle file : std::views::reverse(files_)) {
    library.handle_deregister(file);
  }
  session_.reset();
  return true;
}

}  // namespace tutti
