#include "godwit/serve/image_url.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "godwit/serve/protocol.h"
#include "tests/support/files.h"

namespace godwit::serve {
namespace {

std::string refusal(const std::string& url, const std::string& directory = {}) {
  try {
    image_bytes(url, "messages[0].content[1]", directory);
  } catch (const ApiError& e) {
    EXPECT_EQ(e.status(), 400);
    EXPECT_TRUE(std::string(e.what()).starts_with("messages[0].content[1]: ")) << e.what();
    return e.what();
  }
  return "";
}

TEST(ImageUrl, DataUrlsAlone) {
  EXPECT_EQ(image_bytes("data:image/png;base64,Zm9v", "x", ""), "foo");
  EXPECT_EQ(image_bytes("data:;base64,Zm9v", "x", ""), "foo");
  for (const char* url :
       {"http://127.0.0.1/x.png", "https://example.com/x", "ftp://x", "/etc/passwd", "x.png"})
    EXPECT_NE(refusal(url).find("fetches nothing"), std::string::npos) << url;
  EXPECT_NE(refusal("data:image/png,abc").find("base64"), std::string::npos);
  EXPECT_NE(refusal("data:image/png;base64,%%%"), "");
  EXPECT_NE(refusal("file:///etc/passwd").find("reads no files"), std::string::npos);
}

TEST(ImageUrl, FilesBelowTheDirectoryAlone) {
  const testing::ScratchDir dir;
  std::filesystem::create_directories(dir.path() / "in/deep");
  testing::put_file(dir.path() / "in/deep/a.png", "picture");
  testing::put_file(dir.path() / "secret", "no");
  std::filesystem::create_symlink(dir.path() / "secret", dir.path() / "in/link");
  const std::string root = (dir.path() / "in").string();
  EXPECT_EQ(image_bytes("file:deep/a.png", "x", root), "picture");
  EXPECT_EQ(image_bytes("file://" + root + "/deep/a.png", "x", root), "picture");
  for (const std::string& url :
       {std::string("file:../secret"), std::string("file:link"), std::string("file:deep"),
        std::string("file:none"), "file://" + (dir.path() / "secret").string(),
        std::string("file:///etc/passwd"), std::string("file:deep/../../secret"),
        "file:" + std::string(5000, 'a')})
    EXPECT_NE(refusal(url, root).find("no such file"), std::string::npos) << url;
  EXPECT_NE(refusal(std::string("file:deep/a.png\0x", 17), root).find("zero byte"), std::string::npos);
}

}  // namespace
}  // namespace godwit::serve
