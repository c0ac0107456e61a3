#include "godwit/io/ffmpeg/decode_video.h"

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/dict.h>
#include <libswscale/swscale.h>
}

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

// Containers that hold a video by itself. Playlists and the like would name other files.
constexpr const char* kFormats = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,ogg";
constexpr int kReadBuffer = 1 << 16;

struct Fault {
  std::string text;
};

void require(bool holds, const std::string& text) {
  if (!holds) throw Fault{text};
}

std::string error_text(int code) {
  char text[AV_ERROR_MAX_STRING_SIZE] = {};
  av_strerror(code, text, sizeof text);
  return text;
}

// The file in memory, as ffmpeg reads.
struct Memory {
  const uint8_t* data;
  int64_t size, at = 0;

  static int read(void* opaque, uint8_t* to, int wanted) {
    auto* m = static_cast<Memory*>(opaque);
    const int64_t count = std::min<int64_t>(wanted, m->size - m->at);
    if (count <= 0) return AVERROR_EOF;
    std::memcpy(to, m->data + m->at, static_cast<size_t>(count));
    m->at += count;
    return static_cast<int>(count);
  }
  static int64_t seek(void* opaque, int64_t offset, int whence) {
    auto* m = static_cast<Memory*>(opaque);
    if (whence == AVSEEK_SIZE) return m->size;
    const int64_t base = whence == SEEK_CUR ? m->at : whence == SEEK_END ? m->size : 0;
    if (base + offset < 0 || base + offset > m->size) return -1;
    return m->at = base + offset;
  }
};

// Each is given back also when the constructor of Video does not come to its end.
struct Free {
  void operator()(AVIOContext* io) const {
    av_freep(&io->buffer);
    avio_context_free(&io);
  }
  void operator()(AVFormatContext* format) const { avformat_close_input(&format); }
  void operator()(AVCodecContext* codec) const { avcodec_free_context(&codec); }
  void operator()(AVPacket* packet) const { av_packet_free(&packet); }
  void operator()(AVFrame* frame) const { av_frame_free(&frame); }
  void operator()(SwsContext* scaler) const { sws_freeContext(scaler); }
};
template <class T>
using Owned = std::unique_ptr<T, Free>;

class Video {
 public:
  explicit Video(const GodwitVideoJob& job) : job_(job), memory_{job.file, static_cast<int64_t>(job.bytes)} {
    open();
    const int found = avformat_find_stream_info(format_.get(), nullptr);
    require(found >= 0, "the video's streams cannot be read: " + error_text(found));
    const AVCodec* decoder = nullptr;
    stream_ = av_find_best_stream(format_.get(), AVMEDIA_TYPE_VIDEO, -1, -1, &decoder, 0);
    require(stream_ >= 0 && decoder, "there is no video in it, or none that can be decoded");
    codec_.reset(avcodec_alloc_context3(decoder));
    require(codec_ != nullptr, "out of memory");
    avcodec_parameters_to_context(codec_.get(), format_->streams[stream_]->codecpar);
    check_size(codec_->width, codec_->height);
    // What a frame itself says later, before memory is taken for it; its rows may be padded.
    codec_->max_pixels = 2 * job_.max_pixels + (1 << 16);
    const int ready = avcodec_open2(codec_.get(), decoder, nullptr);
    require(ready >= 0, "the video's decoder does not start: " + error_text(ready));
    packet_.reset(av_packet_alloc());
    frame_.reset(av_frame_alloc());
    require(packet_ && frame_, "out of memory");
  }
  Video(const Video&) = delete;
  Video& operator=(const Video&) = delete;

  void run() {
    while (!enough_) {
      const int got = av_read_frame(format_.get(), packet_.get());
      if (got < 0) {
        require(got == AVERROR_EOF, "damaged: " + error_text(got));
        break;
      }
      if (packet_->stream_index == stream_) decode(packet_.get());
      av_packet_unref(packet_.get());
    }
    if (!enough_) decode(nullptr);
    require(shown_ || enough_, "no frame of it can be decoded");
    if (!enough_) show_until(time_ + duration_);
    if (next_ == 0) show();  // shorter than the slack
  }

 private:
  void open() {
    auto* buffer = static_cast<uint8_t*>(av_malloc(kReadBuffer));
    require(buffer != nullptr, "out of memory");
    io_.reset(
        avio_alloc_context(buffer, kReadBuffer, /*write=*/0, &memory_, Memory::read, nullptr, Memory::seek));
    if (!io_) av_free(buffer);
    AVFormatContext* format = avformat_alloc_context();
    require(io_ && format, "out of memory");
    format->pb = io_.get();
    AVDictionary* options = nullptr;
    av_dict_set(&options, "format_whitelist", kFormats, 0);
    const int opened = avformat_open_input(&format, nullptr, nullptr, &options);  // frees it when it fails
    av_dict_free(&options);
    require(opened >= 0, "not a video that can be read: " + error_text(opened));
    format_.reset(format);
  }

  void check_size(int64_t width, int64_t height) const {
    require(width <= job_.max_side && height <= job_.max_side && width * height <= job_.max_pixels,
            std::to_string(width) + " x " + std::to_string(height) + " pixels are too many");
  }

  // Null: the decoder's rest.
  void decode(const AVPacket* packet) {
    const int sent = avcodec_send_packet(codec_.get(), packet);
    require(sent >= 0 || sent == AVERROR_EOF, "damaged: " + error_text(sent));
    while (!enough_) {
      const int got = avcodec_receive_frame(codec_.get(), frame_.get());
      if (got == AVERROR(EAGAIN) || got == AVERROR_EOF) return;
      require(got >= 0, "damaged: " + error_text(got));
      take(*frame_);
      av_frame_unref(frame_.get());
    }
  }

  // The frame before is on display until this one's time.
  void take(const AVFrame& frame) {
    const AVStream& stream = *format_->streams[stream_];
    const double unit = av_q2d(stream.time_base), rate = av_q2d(stream.avg_frame_rate);
    const double usual = rate > 0 ? 1 / rate : 1 / job_.fps;
    const int64_t stamp = frame.best_effort_timestamp;
    double time = stamp != AV_NOPTS_VALUE ? static_cast<double>(stamp) * unit : time_ + duration_;
    require(std::isfinite(time), "damaged: a frame without a time");
    if (!shown_) start_ = time;
    time = std::max(time - start_, time_);
    if (shown_) show_until(time);
    if (enough_) return;
    convert(frame);
    time_ = time, duration_ = usual, shown_ = true;
  }

  void show_until(double end) {
    constexpr double kSlack = 1e-6;
    while (!enough_ && static_cast<double>(next_) / job_.fps < end - kSlack) show();
  }

  void show() {
    enough_ = !job_.frame(job_.user, rgb_.data(), width_, height_);
    ++next_;
  }

  void convert(const AVFrame& frame) {
    require(frame.width > 0 && frame.height > 0, "a frame without pixels");
    check_size(frame.width, frame.height);
    if (!shown_) width_ = frame.width, height_ = frame.height;
    require(frame.width == width_ && frame.height == height_, "its frames have several sizes");
    scaler_.reset(sws_getCachedContext(
        scaler_.release(), frame.width, frame.height, static_cast<AVPixelFormat>(frame.format), frame.width,
        frame.height, AV_PIX_FMT_RGB24, SWS_BILINEAR | SWS_ACCURATE_RND, nullptr, nullptr, nullptr));
    require(scaler_ != nullptr, "its pixels cannot be converted");
    rgb_.resize(static_cast<size_t>(width_ * height_ * 3));
    uint8_t* rows[] = {rgb_.data()};
    const int strides[] = {static_cast<int>(width_ * 3)};
    const int done = sws_scale(scaler_.get(), frame.data, frame.linesize, 0, frame.height, rows, strides);
    require(done == frame.height, "its pixels cannot be converted");
  }

  const GodwitVideoJob& job_;
  Memory memory_;
  Owned<AVIOContext> io_;  // outlives format_, which reads by it
  Owned<AVFormatContext> format_;
  Owned<AVCodecContext> codec_;
  Owned<AVPacket> packet_;
  Owned<AVFrame> frame_;
  Owned<SwsContext> scaler_;
  int stream_ = -1;
  std::vector<uint8_t> rgb_;  // on display
  int64_t width_ = 0, height_ = 0;
  double start_ = 0, time_ = 0, duration_ = 0;  // of the frame on display, after the first one
  int64_t next_ = 0;                            // sample that is to be shown
  bool shown_ = false, enough_ = false;
};

}  // namespace

int godwit_decode_video(const GodwitVideoJob* job, char* message, size_t message_bytes) {
  av_log_set_level(AV_LOG_QUIET);
  try {
    Video(*job).run();
    return 0;
  } catch (const Fault& fault) {
    std::snprintf(message, message_bytes, "%s", fault.text.c_str());
  } catch (const std::exception& error) {
    std::snprintf(message, message_bytes, "%s", error.what());
  }
  return 1;
}
