// io/safetensors: a file of any bytes.
#include "godwit/io/safetensors.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  const auto path = fuzz::as_file("x.safetensors", fuzz::text(data, size));
  fuzz::accepts([&] {
    const io::SafetensorsFile file(path);
    unsigned sum = 0;
    for (const io::StoredTensor& tensor : file.tensors()) {
      for (const std::byte b : file.bytes(tensor)) sum += static_cast<unsigned>(b);
      fuzz::require(file.find(tensor.name) == &tensor);
    }
    fuzz::require(file.find("no such tensor") == nullptr || sum + 1 > 0);
  });
  return 0;
}
