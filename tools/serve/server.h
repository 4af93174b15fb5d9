// The HTTP side of `sluice serve`.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "sluice/batcher.h"
#include "tools/serve/completion.h"

namespace sluice::tools {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;  // 0: any that is free
  std::string api_key;
  std::size_t most_body = 0;  // bytes
  int connections = 64;       // served at a time
  std::chrono::seconds patience{
      30};  // with a client that does not read, or does not finish sending
};

class HttpServer {
 public:
  // Binds, but does not serve yet. `batcher` and what `served` points to must outlive it. Throws
  // Error{io} if the address cannot be bound.
  HttpServer(const ServerOptions& options, const ServedModel& served, Batcher& batcher);
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  ~HttpServer();

  int port() const;
  // Serves until stop(), from another thread.
  void run();
  // From here on new requests get 503.
  void refuse_new();
  // Call after the batcher has been drained: waits for answers that are being sent.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::tools
