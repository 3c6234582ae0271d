-- Data sets as a script names them.
local dt = require "dtrain"
local data = dt.data
local support = require "support"

local function message(f, ...)
  local ok, e = pcall(f, ...)
  assert.is_false(ok)
  return e
end

local folder = os.tmpname()
os.remove(folder)
os.execute("mkdir -p " .. folder)

local function write(name, text)
  local path = folder .. "/" .. name
  local f <close> = assert(io.open(path, "wb"))
  f:write(text)
  return path
end

describe("data", function()
  teardown(function() os.execute("rm -rf " .. folder) end)

  it("reads text as windows of bytes", function()
    local set = data.text { file = write("t.txt", ("abcdefghij"):rep(11)), context = 10,
      split = { train = 0.8, valid = 0.2 } }
    assert.are.equal(10, set:count())
    assert.are.equal(8, set:part("train"):count())
    assert.are.equal(2, set:part("valid"):count())
    local fields = set:fields()
    assert.are.same({ "inputs", "targets" }, { fields[1].name, fields[2].name })
    assert.are.same({ 10 }, fields[1].shape)
  end)
  it("reads IDX files", function()
    local images = write("i.idx", string.pack(">I4I4I4I4", 0x803, 3, 2, 2) .. string.char(0, 255, 0, 0, 1, 1, 1, 1, 9,
      9, 9, 9))
    local labels = write("l.idx", string.pack(">I4I4", 0x801, 3) .. string.char(0, 1, 2))
    local set = data.idx { images = images, labels = labels, transforms = { data.flatten() } }
    assert.are.equal(3, set:count())
    assert.are.same({ 4 }, set:fields()[1].shape)
    assert.matches("3 samples", tostring(set))
  end)
  it("reads CSV", function()
    local set = data.csv { file = write("c.csv", "a,b,y\n1,2,0\n3,4,1\n"), targets = "y", classes = true }
    assert.are.equal(2, set:count())
    assert.are.same({ 2 }, set:fields()[1].shape)
    assert.are.equal("i64", set:fields()[2].dtype)
  end)
  it("reads .npy files", function()
    local path = folder .. "/x.npy"
    dt.save(path, dt.rand({ 6, 3 }, 1))
    assert.are.equal(6, data.npy { inputs = path }:count())
  end)
  it("takes tensors and functions", function()
    local set = data.tensors { inputs = dt.rand({ 8, 2 }, 1), targets = dt.rand({ 8, 1 }, 2) }
    assert.are.equal(8, set:count())
    set = data.from(function(i) return dt.full({ 3 }, i), i end, 5)
    assert.are.equal(5, set:count())
  end)
  it("makes synthetic sets", function()
    assert.are.equal(100, data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }:count())
    assert.are.equal(64, data.synthetic { inputs = { 784 }, classes = 10, samples = 64 }:count())
    assert.are.same({ 16 }, data.synthetic { tokens = 512, context = 16, samples = 4 }:fields()[1].shape)
  end)
  it("splits without overlap, by fractions and counts", function()
    local set = data.synthetic { inputs = { 2 }, classes = 2, samples = 101 }:split { train = 0.5, valid = 0.25,
      test = 0.25 }
    assert.are.equal(101, set:part("train"):count() + set:part("valid"):count() + set:part("test"):count())
    set = data.synthetic { inputs = { 2 }, classes = 2, samples = 100 }:split { train = 90, valid = 10 }
    assert.are.equal(90, set:part("train"):count())
  end)
  it("refuses bad splits", function()
    local set = data.synthetic { inputs = { 2 }, classes = 2, samples = 10 }
    assert.matches("at most 1", message(set.split, set, { train = 0.9, valid = 0.2 }))
    assert.matches("empty", message(set.split, set, { train = 0.99, valid = 0.01 }))
    assert.matches("names", message(set.split, set, { 0.9, 0.1 }))
  end)
  it("refuses what no transform is", function()
    assert.matches("not a transform", message(data.synthetic,
      { inputs = { 2 }, classes = 2, transforms = { "flatten" } }))
  end)
  it("normalises by channel", function()
    local t = data.normalise { mean = { 1, 2 }, std = 2 }
    assert.are.same({ 2, 2 }, t.std)
    assert.matches("give as many", message(data.normalise, { mean = { 1, 2, 3 }, std = { 1, 2 } }))
  end)
end)

describe("a split", function()
  local function parts(split, n)
    local set = data.tensors { inputs = dt.arange(n):to "f32":reshape { n, 1 }, split = split }
    return set:part "train" and set:part("train"):count(), set:part "valid" and set:part("valid"):count()
  end
  it("takes counts where one is more than 1, or ones are more than the whole", function()
    for _, c in ipairs { { { train = 39, valid = 1 }, 40, 39, 1 }, { { train = 1, valid = 39 }, 40, 1, 39 },
      { { train = 1, valid = 1 }, 2, 1, 1 },
      { { train = 30, valid = 9 }, 100, 30, 9 }, { { train = 1 }, 40, 40 }, { { train = 0.975, valid = 0.025 }, 40, 39, 1 },
      { { train = 0.5, valid = 0.25 }, 40, 20, 10 } } do
      local train, valid = parts(c[1], c[2])
      assert.are.equal(c[3], train)
      assert.are.equal(c[4], valid)
    end
  end)
  it("of a text by counts has exactly so many samples", function()
    local path = os.tmpname()
    local f <close> = assert(io.open(path, "w"))
    f:write(("abcdefgh"):rep(40), "x")
    f:flush()
    local set = data.text { file = path, context = 8, split = { train = 39, valid = 1 } }
    assert.are.equal(39, set:part("train"):count())
    assert.are.equal(1, set:part("valid"):count())
    os.remove(path)
  end)
end)

local other = support.folder()
local function store(name, bytes)
  local path = other .. "/" .. name
  local f <close> = assert(io.open(path, "wb"))
  f:write(bytes)
  return path
end
describe("a .npy file", function()
  local function npy(descr, format, values)
    local head = ("{'descr': '%s', 'fortran_order': False, 'shape': (%d,), }"):format(descr, #values)
    local bytes = {}
    for i, v in ipairs(values) do bytes[i] = ("<" .. format):pack(v) end
    return store("x.npy", "\x93NUMPY\1\0" .. ("<I2"):pack(#head) .. head .. table.concat(bytes))
  end
  for _, c in ipairs { { "|i1", "i1", { 0, -128, 127 }, "i32" }, { "<i2", "i2", { 0, -32768, 32767 }, "i32" },
    { "<u2", "I2", { 0, 50256, 65535 }, "i32" }, { "<u4", "I4", { 0, 4294967295, 7 }, "i64" },
    { "<u8", "I8", { 0, math.maxinteger, 7 }, "i64" } } do
    it("of " .. c[1] .. " is read as " .. c[4], function()
      local path = npy(c[1], c[2], c[3])
      local t = dt.load(path)
      assert.are.equal(c[4], t:dtype())
      assert.are.same(c[3], t:totable())
      local set = data.npy { inputs = path }
      assert.are.equal(c[4], set:fields()[1].dtype)
    end)
  end
  it("of u8 beyond i64 is refused", function()
    assert.matches("element 1 is 18446744073709551615, which i64 does not hold", message(dt.load, npy("<u8", "I8", { 1, -1 })))
  end)
end)

describe("a CSV file without a header", function()
  local path = store("plain.csv", "1,2,0\n3,4,1\n")
  it("loses no sample", function()
    assert.matches("plain.csv:1: holds numbers where the names of columns would stand; set header = false",
      message(data.csv, { file = path, targets = 3 }))
    assert.matches("holds numbers", message(data.csv, { file = store("a.csv", "1.5, 2 ,x\n3,4,y\n"), inputs = { 1, 2 } }))
    assert.are.equal(2, data.csv({ file = path, targets = 3, header = false }):count())
    assert.are.equal(1, data.csv({ file = path, targets = 3, header = true }):count())
  end)
  it("is none where columns are called by its names, or one is no number", function()
    assert.are.equal(1, data.csv({ file = store("years.csv", "2019,2020\n1,2\n"), targets = "2020" }):count())
    assert.are.equal(1, data.csv({ file = store("names.csv", "a,2020\n1,2\n"), targets = 2 }):count())
  end)
end)

describe("gzip data", function()
  local bytes = ("a,b\n1,2\n"):rep(1) .. ("3,4\n"):rep(500)
  local function zipped(more)
    local plain = store("z.csv", bytes)
    os.execute(("gzip -c %s > %s.gz"):format(plain, plain))
    local f <close> = assert(io.open(plain .. ".gz", "rb"))
    return store("padded.csv.gz", f:read "a" .. more)
  end
  it("may be padded with zeros", function()
    for _, n in ipairs { 1, 7, 8, 512, 10240 } do
      assert.are.equal(501, data.csv({ file = zipped(("\0"):rep(n)), targets = "b" }):count())
    end
  end)
  it("followed by anything else is damaged", function()
    assert.matches("damaged", message(data.csv, { file = zipped("\0\0x"), targets = "b" }))
  end)
end)
