// Files to read: opening past the page cache (O_DIRECT, F_NOCACHE) or through it, whole-extent synchronous reads, and what
// of a file the page cache holds. Owns file descriptors. Knows nothing of queues.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>

namespace stoker::io {

struct FileError : std::system_error {
  FileError(int error, std::string file) : std::system_error(error, std::generic_category()), path(std::move(file)) {}
  std::string path;
};

class File {
 public:
  // direct: past the page cache; where the file system refuses that, the file is buffered and direct() says so.
  // Throws FileError (missing, no permission, not a regular file or block device).
  File(std::string path, bool direct);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }
  std::uint64_t nbytes() const;
  void close();  // path() and direct() stay

 private:
  std::string path_;
  int fd_ = -1;
  bool direct_ = false;
};

struct ShortRead : std::runtime_error {
  explicit ShortRead(std::size_t got) : std::runtime_error("the file ends inside the read"), got_bytes(got) {}
  std::size_t got_bytes;
};

// Reads [offset, offset + length) to `to` without leaving it in the page cache: direct where the file system can, in place
// where file and memory are aligned alike, else through a small bounce buffer. Any alignment is accepted.
// `checkpoint` is called about every 64 MiB and may throw to stop. Returns whether direct reads were used.
// Throws FileError, or ShortRead when the file ends early.
bool read_file_into(const std::string& path, std::uint64_t offset, std::size_t length, std::uint8_t* to,
                    const std::function<void()>& checkpoint);

// Writes back and drops the file's pages from the page cache. Throws FileError (ENOTSUP where the system cannot).
void drop_cache(const std::string& path);

// Bytes of the file that the page cache holds now. Throws FileError.
std::size_t cached_bytes(const std::string& path);

}  // namespace stoker::io
