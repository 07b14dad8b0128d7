// Small reads and writes of the files under /sys and /proc. A failed write names the file, the text and the reason;
// a failed read gives nothing, as most of these files may be absent.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace tutti::nvme {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }
[[noreturn]] inline void fail_errno(const std::string& what, int error, const std::string& advice = {}) {
  throw std::runtime_error(what + ": " + std::strerror(error) + (advice.empty() ? "" : "; " + advice));
}

// The file's text without white space at its end; empty when it can't be read.
inline std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '\0')) {
    text.pop_back();
  }
  return text;
}

// One write call, as sysfs wants it. Returns 0 or the errno.
inline int try_write_text(const std::string& path, const std::string& text) noexcept {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) {
    return errno;
  }
  const auto written = write(fd, text.data(), text.size());
  const int error = written == static_cast<ssize_t>(text.size()) ? 0 : (written < 0 ? errno : EIO);
  close(fd);
  return error;
}
inline void write_text(const std::string& path, const std::string& text) {
  if (const int error = try_write_text(path, text); error != 0) {
    fail_errno("writing '" + text + "' to " + path, error, error == EACCES || error == EPERM ? "run it as root" : "");
  }
}

// The last part of what a symbolic link names; empty when there is no link.
inline std::string link_name(const std::string& path) {
  std::error_code error;
  const auto target = std::filesystem::read_symlink(path, error);
  return error ? std::string() : target.filename().string();
}

// A file descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  [[nodiscard]] int get() const noexcept { return fd_; }
  void reset() noexcept {
    if (fd_ >= 0) {
      close(std::exchange(fd_, -1));
    }
  }

 private:
  int fd_ = -1;
};

}  // namespace tutti::nvme
