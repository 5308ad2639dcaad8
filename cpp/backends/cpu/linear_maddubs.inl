// Integer products without an instruction for 4-byte dot products: pairs of products are summed in 16 bits. A unit of 32 columns of
// 4-bit codes fits (8 * 2 * 15 * 127 < 2^15), and a byte counts as two such codes. Included in the anonymous namespace of one
// instruction set, after its add_products, sum_pairs, plus, times16 and broadcast_int.

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 4;
  Ints low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints sum;  // 16-bit
    void begin(int32_t) { sum = broadcast_int(0); }
    void add(const Nibbles& c, const int8_t* x) {
      add_products(sum, c.low, broadcast4(x));
      add_products(sum, c.high, broadcast4(x + 4));
    }
    Ints total(int32_t start) const { return plus(sum_pairs(sum), broadcast_int(start)); }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = kByteTokens;
  Ints low, high;
  static Bytes load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints low, high;  // 16-bit
    void begin(int32_t) { low = high = broadcast_int(0); }
    void add(const Bytes& c, const int8_t* x) {
      const Ints four = broadcast4(x);
      add_products(low, c.low, four);
      add_products(high, c.high, four);
    }
    Ints total(int32_t start) const { return plus(plus(sum_pairs(low), times16(sum_pairs(high))), broadcast_int(start)); }
  };
};
