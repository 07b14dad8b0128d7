// A libcufile that records and really moves bytes: "GPU memory" is host memory, I/O is pread and pwrite, done when a
// status is asked for, in reverse order of submission. Fails, shortens, hangs and repeats where a test says so, and
// notes every use that the real library doesn't allow. Like the real one it writes a log into the working directory.
#include "fake_cufile.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tutti/gds/cufile_abi.h"

using namespace tutti::cufile;

namespace {

struct Entry {
  BatchEntry parameters{};
  int fate = 0;
  int64_t value = 0;
  bool told_pending = false;
  bool cancelled = false;
};
struct Batch {
  unsigned capacity = 0;
  std::vector<Entry> entries;
  std::vector<BatchEvent> repeats;
};
struct Fake {
  std::string log, violations;
  std::map<std::string, std::pair<int, int>> failures;
  std::map<int, std::pair<int, int64_t>> fates;
  std::map<Handle, int> files;
  std::map<const void*, size_t> buffers;
  std::map<BatchHandle, Batch> batches;
  unsigned events_per_call = 1000, batch_entries = 128;
  int submitted = 0, opened = 0;
  bool released = false;
  uintptr_t next = 0x1000;
};

std::mutex mutex;
std::unique_ptr<Fake>& holder() {
  static std::unique_ptr<Fake> state = std::make_unique<Fake>();
  return state;
}
Fake& state() { return *holder(); }

void violation(const std::string& what) { state().violations += what + "\n"; }

constexpr int kFakeAbort = -1, kFakeForever = -2;

int from_environment(const std::string& name) {
  const char* text = std::getenv("FAKE_CUFILE_FAIL");
  const char* at = text == nullptr ? nullptr : std::strstr(text, (name + "=").c_str());
  return at == nullptr ? 0 : static_cast<int>(std::strtol(at + name.size() + 1, nullptr, 10));
}

// Notes a call; the error that it must give instead of working, else success.
Error enter(const std::string& name, const std::string& arguments, bool noted = true) {
  if (noted) {
    state().log += name + "(" + arguments + ")\n";
  }
  if (const int code = from_environment(name); code != 0) {
    if (code == kFakeAbort) {
      std::abort();
    }
    while (code == kFakeForever) {
      pause();
    }
    return {code, 0};
  }
  const auto found = state().failures.find(name);
  if (found == state().failures.end() || --found->second.first > 0) {
    return {kSuccess, 0};
  }
  const int code = found->second.second;
  state().failures.erase(found);
  return {code, code == kCudaDriverError ? 2 : 0};
}

#define ENTER(...)                               \
  const std::lock_guard<std::mutex> lock(mutex); \
  const Error fails = enter(__VA_ARGS__);        \
  if (fails.code != kSuccess) return fails

int64_t move_bytes(const BatchEntry& entry, size_t bytes) {
  const auto file = state().files.find(entry.file);
  const auto buffer = state().buffers.find(entry.buffer);
  if (file == state().files.end() || buffer == state().buffers.end() ||
      static_cast<size_t>(entry.buffer_offset) + bytes > buffer->second) {
    violation("an entry with an unknown file or outside of its buffer");
    return -5022;
  }
  char* memory = static_cast<char*>(entry.buffer) + entry.buffer_offset;
  return entry.opcode == kOpWrite ? pwrite(file->second, memory, bytes, entry.file_offset)
                                  : pread(file->second, memory, bytes, entry.file_offset);
}

// Whether the entry ends now, and how.
bool ends(Entry& entry, BatchEvent& event) {
  event = {entry.parameters.cookie, kComplete, 0};
  int64_t result = 0;
  switch (entry.fate) {
    case kFakeShort:
      result = move_bytes(entry.parameters, static_cast<size_t>(entry.value));
      break;
    case kFakeResult:
      event.status = kFailed;
      result = entry.value;
      break;
    case kFakeStatus:
      event.status = static_cast<int>(entry.value);
      break;
    case kFakeHang:
      event.status = kCanceled;
      if (!entry.cancelled) {
        return false;
      }
      break;
    case kFakeStuck:
      if (!state().released) {
        return false;
      }
      result = move_bytes(entry.parameters, entry.parameters.bytes);
      break;
    case kFakeTooMuch:
      result = static_cast<int64_t>(entry.parameters.bytes) + 1;
      break;
    default:
      if (entry.cancelled) {
        event.status = kCanceled;
      } else {
        result = move_bytes(entry.parameters, entry.parameters.bytes);
      }
  }
  event.result = static_cast<size_t>(result);
  return true;
}

}  // namespace

extern "C" {

Error cuFileDriverOpen() {
  ENTER("cuFileDriverOpen", "");
  const char* path = std::getenv("CUFILE_LOGFILE_PATH");
  if (FILE* log = std::fopen(path != nullptr ? path : "cufile.log", "a"); log != nullptr) {
    std::fputs("opened\n", log);
    std::fclose(log);
  }
  std::puts("noise of the library on standard output");
  ++state().opened;
  return {kSuccess, 0};
}
Error cuFileDriverClose_v2() {
  ENTER("cuFileDriverClose", "");
  --state().opened;
  if (!state().batches.empty() || !state().files.empty() || !state().buffers.empty()) {
    violation("the driver was closed with something left");
  }
  return {kSuccess, 0};
}
Error cuFileDriverGetProperties(DriverProperties* properties) {
  ENTER("cuFileDriverGetProperties", "");
  properties->max_batch_entries = state().batch_entries;
  return {kSuccess, 0};
}
Error cuFileGetVersion(int* version) {
  *version = 1150;
  return {kSuccess, 0};
}
Error cuFileHandleRegister(Handle* handle, Descriptor* descriptor) {
  ENTER("cuFileHandleRegister", std::to_string(descriptor->type));
  *handle = reinterpret_cast<Handle>(state().next++);
  state().files[*handle] = descriptor->handle.fd;
  return {kSuccess, 0};
}
void cuFileHandleDeregister(Handle handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  state().log += "cuFileHandleDeregister()\n";
  if (state().files.erase(handle) != 1) {
    violation("an unknown file was deregistered");
  }
}
Error cuFileBufRegister(const void* base, size_t bytes, int flags) {
  ENTER("cuFileBufRegister", std::to_string(bytes) + "," + std::to_string(flags));
  state().buffers[base] = bytes;
  return {kSuccess, 0};
}
Error cuFileBufDeregister(const void* base) {
  ENTER("cuFileBufDeregister", "");
  return {state().buffers.erase(base) == 1 ? kSuccess : 5024, 0};
}
Error cuFileBatchIOSetUp(BatchHandle* batch, unsigned entries) {
  ENTER("cuFileBatchIOSetUp", std::to_string(entries));
  *batch = reinterpret_cast<BatchHandle>(state().next++);
  state().batches[*batch].capacity = entries;
  return {kSuccess, 0};
}
Error cuFileBatchIOSubmit(BatchHandle handle, unsigned count, BatchEntry* entries, unsigned flags) {
  ENTER("cuFileBatchIOSubmit", std::to_string(count) + "," + std::to_string(flags));
  const auto batch = state().batches.find(handle);
  if (batch == state().batches.end() || !batch->second.entries.empty() || count > batch->second.capacity) {
    violation("a submit to a batch that is gone, busy or too small");
    return {5035, 0};
  }
  for (unsigned i = 0; i < count; ++i) {
    const auto fate = state().fates.find(++state().submitted);
    Entry entry{entries[i]};
    if (fate != state().fates.end()) {
      entry.fate = fate->second.first;
      entry.value = fate->second.second;
    }
    batch->second.entries.push_back(entry);
  }
  return {kSuccess, 0};
}
Error cuFileBatchIOGetStatus(BatchHandle handle, unsigned, unsigned* count, BatchEvent* events, timespec*) {
  ENTER("cuFileBatchIOGetStatus", "", false);
  const auto found = state().batches.find(handle);
  if (found == state().batches.end()) {
    violation("a status of a batch that is gone");
    return {5022, 0};
  }
  Batch& batch = found->second;
  const unsigned room = std::min(*count, state().events_per_call);
  unsigned told = 0;
  while (told < room && !batch.repeats.empty()) {
    events[told++] = batch.repeats.back();
    batch.repeats.pop_back();
  }
  for (size_t i = batch.entries.size(); i-- > 0 && told < room;) {
    Entry& entry = batch.entries[i];
    if (entry.fate == kFakePending && !entry.told_pending) {
      entry.told_pending = true;
      events[told++] = {entry.parameters.cookie, kPending, 0};
    } else if (ends(entry, events[told])) {
      if (entry.fate == kFakeTwice) {
        batch.repeats.push_back(events[told]);
      }
      ++told;
      batch.entries.erase(batch.entries.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  *count = told;
  return {kSuccess, 0};
}
Error cuFileBatchIOCancel(BatchHandle handle) {
  ENTER("cuFileBatchIOCancel", "");
  const auto found = state().batches.find(handle);
  if (found == state().batches.end()) {
    violation("a cancel of a batch that is gone");
    return {5022, 0};
  }
  for (Entry& entry : found->second.entries) {
    entry.cancelled = true;
  }
  return {kSuccess, 0};
}
void cuFileBatchIODestroy(BatchHandle handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  state().log += "cuFileBatchIODestroy()\n";
  if (state().batches.erase(handle) != 1) {
    violation("an unknown batch was destroyed");
  }
}

void fake_cufile_reset() {
  const std::lock_guard<std::mutex> lock(mutex);
  holder() = std::make_unique<Fake>();
}
void fake_cufile_fail(const char* function, int call, int code) { state().failures[function] = {call, code}; }
void fake_cufile_entry(int nth, int fate, int64_t value) { state().fates[nth] = {fate, value}; }
void fake_cufile_release() { state().released = true; }
void fake_cufile_limits(unsigned events_per_call, unsigned batch_entries) {
  state().events_per_call = events_per_call;
  state().batch_entries = batch_entries;
}
const char* fake_cufile_log() { return state().log.c_str(); }
int fake_cufile_alive() {
  return state().opened + static_cast<int>(state().files.size() + state().buffers.size() + state().batches.size());
}
const char* fake_cufile_violations() { return state().violations.c_str(); }

}  // extern "C"
