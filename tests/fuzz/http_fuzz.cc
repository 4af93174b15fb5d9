// What a client sends to `sluice serve`: a method and path, and after a line "---" the body; or,
// after a first line "raw", the bytes as they are. The server answers, or closes the connection; a
// refusal is OpenAI's error object with a code below 500, and the next client is served. The corpus
// has no constraints, because masks are kept for answers that are drawn at random.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "sluice/batcher.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/heap.h"
#include "tests/fuzz/small_engine.h"
#include "tools/serve/server.h"

namespace sluice::fuzz {
namespace {

constexpr std::string_view kRaw = "raw\n";

// A server on a free port, which lasts as long as the process.
class Server {
 public:
  Server()
      : batcher_(small_engine(), batching()),
        constraints_(small_engine().tokenizer()),
        http_(options(), model(), batcher_),
        thread_([this] { http_.run(); }) {}
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() {
    batcher_.drain(std::chrono::milliseconds(1000));
    http_.stop();
    thread_.join();
  }

  int port() const { return http_.port(); }
  bool is_idle() const { return batcher_.stats().running == 0 && batcher_.stats().queued == 0; }

 private:
  static BatcherOptions batching() {
    BatcherOptions options;
    options.context = 256;
    options.running = 2;
    options.cached = 0;
    return options;
  }
  static tools::ServerOptions options() {
    tools::ServerOptions options;
    options.port = 0;
    options.most_body = 1 << 16;
    options.connections = 2;
    options.patience = std::chrono::seconds(1);
    return options;
  }
  tools::ServedModel model() const {
    tools::ServedModel model;
    model.engine = &small_engine();
    model.chat = &small_chat();
    model.constraints = &constraints_;
    model.name = "small";
    model.context = 256;
    model.most_tokens = 16;
    model.most_choices = 2;
    return model;
  }

  Batcher batcher_;
  Constraints constraints_;
  tools::HttpServer http_;
  std::thread thread_;
};

bool is_whole(std::string_view response) {
  constexpr std::string_view kLength = "Content-Length: ";
  const std::size_t head = response.find("\r\n\r\n");
  if (head == std::string_view::npos) return false;
  const std::size_t at = response.substr(0, head).find(kLength);
  if (at == std::string_view::npos) return response.ends_with("\r\n0\r\n\r\n");
  std::size_t length = 0;
  const char* const digits = response.data() + at + kLength.size();
  std::from_chars(digits, response.data() + head, length);
  return response.size() >= head + 4 + length;
}

class Connection {
 public:
  explicit Connection(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto* const to = reinterpret_cast<const sockaddr*>(&address);
    require(socket_ >= 0 && ::connect(socket_, to, sizeof address) == 0, "a client can connect");
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { ::close(socket_); }

  // Sends all of it, unless the server closes first.
  void send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }

  void end_sending() const { ::shutdown(socket_, SHUT_WR); }

  // One response, or what there is of it when the server closes.
  std::string receive() const {
    std::string all;
    std::array<char, 4096> part{};
    while (!is_whole(all)) {
      const ssize_t got = ::recv(socket_, part.data(), part.size(), 0);
      if (got <= 0) return all;
      all.append(part.data(), static_cast<std::size_t>(got));
    }
    return all;
  }

 private:
  int socket_;
};

std::string request_of(std::string_view input) {
  if (input.starts_with(kRaw)) return std::string(input.substr(kRaw.size()));
  const Parts parts = split_parts(input);
  const std::string_view line = parts.first.substr(0, parts.first.find('\n'));
  return std::string(line) +
         " HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
         "Content-Length: " +
         std::to_string(parts.second.size()) + "\r\n\r\n" + std::string(parts.second);
}

// The status of a response; 0 if the connection was closed without one.
int status_of(std::string_view response) {
  constexpr std::string_view kVersion = "HTTP/1.1 ";
  if (response.empty()) return 0;
  require(response.starts_with(kVersion), "a response has a status");
  response.remove_prefix(kVersion.size());
  int status = 0;
  std::from_chars(response.data(), response.data() + response.size(), status);
  return status;
}

// `is_all`: the client closes its side; the HTTP library then does not answer.
std::string response_to(const Server& server, std::string_view bytes, bool is_all) {
  const Connection connection(server.port());
  connection.send(bytes);
  if (is_all) connection.end_sending();
  return connection.receive();
}

void hold_refusal(std::string_view response) {
  const std::size_t head = response.find("\r\n\r\n");
  require(head != std::string_view::npos, "a response has a head");
  const auto body = nlohmann::json::parse(response.substr(head + 4), nullptr, false);
  require(body.is_object() && body.contains("error") && body["error"]["message"].is_string(),
          "a refusal is an error object");
}

// What is sent and what holds of the response.
struct Outcome {
  int status = 0;
  std::size_t bytes = 0;
};

Outcome outcome_of(const Server& server, std::string_view input) {
  const bool is_raw = input.starts_with(kRaw);
  const std::string response = response_to(server, request_of(input), is_raw);
  const int status = status_of(response);
  require(status < 500, "a request is never the server's fault");
  require(status > 0 || is_raw, "a whole request is answered");
  if (status >= 400 && !is_raw) hold_refusal(response);
  return {status, response.size()};
}

// The threads of the server free what a request took a moment after the client has its answer.
void wait_for_rest(const Server& server, std::int64_t heap_before) {
  constexpr int kMostWaits = 50;
  for (int i = 0; i < kMostWaits; ++i) {
    if (server.is_idle() && heap_bytes() <= heap_before) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& /*folder*/) {
  static const Server server;
  const std::int64_t heap_before = heap_bytes();
  const Outcome outcome = outcome_of(server, input);
  wait_for_rest(server, heap_before);
  static int inputs = 0;
  if (++inputs % 64 == 0) {
    const std::string health =
        response_to(server, "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", false);
    require(status_of(health) == 200, "the next client is served");
  }
  // Statuses are kinds of answers, and so are lengths of about the same size.
  // Whether raw bytes are answered depends on when the server sees that there are no more.
  return {!input.starts_with(kRaw) && outcome.status >= 200 && outcome.status < 300,
          std::string(static_cast<std::size_t>(outcome.status / 10), '.') +
              std::string(static_cast<std::size_t>(std::bit_width(outcome.bytes)), '+')};
}

}  // namespace sluice::fuzz
