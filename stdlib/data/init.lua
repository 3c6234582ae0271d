-- The data table: data sets as a script names them. A set has fields, "inputs" for the model and "targets" for the
-- loss; files are mapped and opened here, so that a missing or damaged one is an error at the script's line.
local core = require "dtrain.core"
local sources = require "dtrain.sources"
local util = require "dtrain.util"

local Set = { __name = "dataset" }
Set.__index = Set

local data = {}

function data.is(x) return getmetatable(x) == Set end

-- ---- transforms: of "inputs", sample by sample ----

local Transform = { __name = "transform" }

local function transform(t) return setmetatable(t, Transform) end

--- data.normalise{ mean =, std = }: (x - mean) / std; numbers, or lists with one number for each channel (dim 0 of a
--- sample).
function data.normalise(options)
  local o = util.options("data.normalise", options, { { "mean", "number|table", 0 }, { "std", "number|table", 1 } })
  local mean, std = o.mean, o.std
  if type(mean) == "number" then mean = { mean } end
  if type(std) == "number" then std = { std } end
  for _, v in ipairs(mean) do util.check("data.normalise: mean", v, "number") end
  for _, v in ipairs(std) do util.check("data.normalise: std", v, "positive") end
  if #mean ~= #std then
    if #mean == 1 then mean = util.map(std, function() return mean[1] end)
    elseif #std == 1 then std = util.map(mean, function() return std[1] end)
    else util.fail("data.normalise: %d means but %d deviations; give as many", #mean, #std) end
  end
  return transform { kind = "normalise", mean = mean, std = std }
end

--- data.scale{ mul = 1, add = 0 }: x * mul + add in f32.
function data.scale(options)
  local o = util.options("data.scale", options, { { "mul", "number", 1 }, { "add", "number", 0 } })
  return transform { kind = "scale", mul = o.mul, add = o.add }
end

--- data.cast(dtype)
function data.cast(dtype) return transform { kind = "cast", dtype = util.check("data.cast", dtype, "string") } end

--- data.flatten(): a sample as one dim.
function data.flatten() return transform { kind = "reshape", shape = { -1 } } end

--- data.reshape(shape): of one sample; one dim may be -1.
function data.reshape(shape) return transform { kind = "reshape",
  shape = util.check("data.reshape", shape, "table") } end

--- data.flip(p = 0.5): mirrors the last dim with probability p, keyed by (seed, epoch, sample).
function data.flip(p)
  return transform { kind = "flip", p = util.check("data.flip: p", p == nil and 0.5 or p, "fraction") }
end

--- data.crop(pad): pads the last two dims by zeros and cuts the old size out at a random place, keyed like flip.
function data.crop(pad)
  if type(pad) == "table" then pad = pad.pad end
  return transform { kind = "crop", pad = util.check("data.crop: pad", pad, "count") }
end

-- ---- sets ----

local function wrap(kind, set, options)
  local self = setmetatable({ kind = kind, core = set, parts = {}, tokens = false, where = util.frame() }, Set)
  local list = options and options.transforms
  if list then
    for i, t in ipairs(list) do
      if getmetatable(t) ~= Transform then
        util.fail("transforms[%d] is %s, not a transform; write e.g. transforms = { data.flatten() }", i, util.show(t))
      end
    end
    if #list > 0 then self.core = core.transform(self.core, util.map(list, util.copy)) end
  end
  if options and options.split then self:split(options.split) end
  return self
end

-- Whether a split gives counts of samples: a part of more than 1, or whole numbers that are more than the whole together.
local function counts(split)
  local sum, whole, most, names = 0, true, 0, {}
  for name, v in util.sorted(split) do
    if type(name) ~= "string" then util.fail("split wants names, e.g. split = { train = 0.9, valid = 0.1 }") end
    util.check("split: " .. name, v, "positive")
    sum, most, whole = sum + v, math.max(most, v), whole and v == math.floor(v)
    names[#names + 1] = v ~= math.floor(v) and ("%s = %g"):format(name, v) or nil
  end
  if most > 1 and not whole then
    util.fail("split has counts (%g) beside a fraction (%s); give whole numbers of samples, or fractions of at most 1 for all parts",
      most, table.concat(names, ", "))
  end
  return whole and sum > 1
end

-- { name, share } of a split in the order train, valid, test, then others by name; shares of the whole.
local function shares(split, n)
  local order, known, sum = {}, { train = 1, valid = 2, test = 3 }, 0
  local unit = counts(util.check("split", split, "table")) and n or 1
  for name, v in util.sorted(split) do
    order[#order + 1] = { name, v / unit }
    sum = sum + v / unit
  end
  table.sort(order, function(a, b)
    local x, y = known[a[1]] or 9, known[b[1]] or 9
    if x ~= y then return x < y end
    return a[1] < b[1]
  end)
  if #order == 0 then util.fail("split is empty; write split = { train = 0.9, valid = 0.1 }") end
  if sum > 1 + 1e-9 then
    util.fail("the parts of split add up to %.6g of the %d samples; at most 1 (fractions) or %d (counts) is there",
      sum, n, n)
  end
  return order
end

-- Calls f(name, low, high) for each part, low and high fractions of the whole.
local function each_part(split, n, f)
  local low = 0
  for _, part in ipairs(shares(split, n)) do
    local high = low + part[2]
    if high > 1 - 1e-9 then high = 1 end
    f(part[1], low, high)
    low = high
  end
end

--- set:split{ train = 0.9, valid = 0.1 }: contiguous parts without overlap, in the order train, valid, test. Fractions, or counts
--- where one is more than 1 or whole numbers add up to more than 1: { train = 39, valid = 1 } are 39 samples and one.
function Set:split(split)
  local n = self:count()
  each_part(split, n, function(name, low, high)
    local a, b = math.floor(n * low + 0.5), math.floor(n * high + 0.5)
    if b <= a then
      util.fail("split: the part '%s' of %d samples is empty; give it at least one sample", name, n)
    end
    self.parts[name] = self:subset(a, b)
  end)
  return self
end

--- The part of that name, or nil.
function Set:part(name) return self.parts[name] end

--- A set of samples a .. b - 1 (from 0).
function Set:subset(a, b)
  local out = wrap(self.kind, core.subset(self.core, a, b))
  out.tokens, out.about = self.tokens, self.about
  return out
end

--- Number of samples.
function Set:count() return self.core:count() end

--- List of { name, dtype, shape of one sample }.
function Set:fields() return self.core:fields() end

function Set:__tostring()
  local parts = util.map(self:fields(), function(f) return ("%s %s %s"):format(f.name, f.dtype, util.show(f.shape)) end)
  return ("data.%s: %s samples, %s"):format(self.kind, util.commas(self:count()), table.concat(parts, ", "))
end

local shared = { { "split", "table" }, { "transforms", "table" } }

local function options_of(kind, given, spec)
  for _, row in ipairs(shared) do spec[#spec + 1] = row end
  return util.options("data." .. kind, given, spec)
end

--- data.idx{ images =, labels =, split =, transforms = }: IDX files, plain or gzipped. u8 images become f32 in [0,
--- 1], labels i64.
function data.idx(options)
  local o = options_of("idx", options, { { "images", "string", required = true }, { "labels", "string" } })
  return wrap("idx", core.dataset { kind = "idx", images = o.images, labels = o.labels }, o)
end

--- data.text{ file =, context =, split = }: the file's bytes as ids; a sample is `context` ids and the same shifted
--- by one. Parts of a split are parts of the file.
function data.text(options)
  local o = options_of("text", options, { { "file", "string", required = true },
    { "context", "count", required = true } })
  local function open(low, high)
    return core.dataset { kind = "text", file = o.file, context = o.context, low = low, high = high }
  end
  local self = wrap("text", open(0, 1), { transforms = o.transforms })
  self.tokens = true
  if o.split and counts(o.split) then
    self:split(o.split) -- exactly so many samples
  elseif o.split then
    each_part(o.split, self:count(), function(name, low, high)
      local part = wrap("text", open(low, high), { transforms = o.transforms })
      part.tokens = true
      self.parts[name] = part
    end)
  end
  return self
end

--- data.npy{ inputs =, targets = }: .npy files; the first dim counts samples.
function data.npy(options)
  local o = options_of("npy", options, { { "inputs", "string", required = true }, { "targets", "string" } })
  return wrap("npy", core.dataset { kind = "npy", inputs = o.inputs, targets = o.targets }, o)
end

--- data.csv{ file =, targets = columns, inputs = columns (the others), header =, delimiter = ",", classes = false }: columns are
--- header names or numbers from 1; classes = true: the target is one whole number, for CrossEntropy. Unless header is said, line 1
--- names the columns, and is refused where it holds numbers only.
function data.csv(options)
  local o = options_of("csv", options, { { "file", "string", required = true }, { "targets", "string|number|table" },
    { "inputs", "string|number|table" }, { "header", "boolean" }, { "delimiter", "string", "," },
    { "classes", "boolean", false } })
  local function columns(v)
    if v == nil then return nil end
    if type(v) ~= "table" then v = { v } end
    return util.map(v, function(c) return math.type(c) == "integer" and ("%d"):format(c) or tostring(c) end)
  end
  return wrap("csv", core.dataset { kind = "csv", file = o.file, inputs = columns(o.inputs),
    targets = columns(o.targets),
    header = o.header ~= false, guessed = o.header == nil, delimiter = o.delimiter, target_dtype = o.classes and "i64" or "f32" }, o)
end

--- data.cifar10{ files = { ... } } or { dir = }: the binary version; inputs f32 [3, 32, 32] in [0, 1], targets i64.
function data.cifar10(options)
  local o = options_of("cifar10", options, { { "files", "string|table" }, { "dir", "string" } })
  local files = o.files
  if type(files) == "string" then files = { files } end
  if not files then
    if not o.dir then util.fail("data.cifar10 needs files = { ... } or dir = folder of data_batch_1.bin ...") end
    files = {}
    for i = 1, 5 do files[i] = o.dir .. "/data_batch_" .. i .. ".bin" end
  end
  local list = { data.scale { mul = 1 / 255 } }
  for _, t in ipairs(o.transforms or {}) do list[#list + 1] = t end
  return wrap("cifar10", core.dataset { kind = "cifar10", files = files }, { split = o.split, transforms = list })
end

--- data.tensors{ inputs = x, targets = y, order = indices }: in memory; the first dim counts samples. order (a list
--- or tensor of row numbers from 0): the samples of an epoch, in that order, unshuffled; a tensor [epochs, samples] has
--- a row for each epoch, and begins anew after its last.
function data.tensors(options)
  local o = options_of("tensors", options, { { "inputs", "tensor", required = true }, { "targets", "tensor" },
    { "order", "table|tensor" } })
  local order = o.order
  local set = core.dataset { kind = "tensors", inputs = o.inputs, targets = o.targets, order = order }
  local self = wrap("tensors", set, { transforms = o.transforms })
  self.about = order and "in order " .. core.hash(core.is_tensor(order) and order or table.concat(order, " ")) or nil
  return o.split and self:split(o.split) or self
end

--- data.from(function(i) return inputs, targets end, n): sample i (from 0) by a Lua function that returns tensors,
--- numbers or nested lists; the first sample's shapes hold for all.
function data.from(f, n, options)
  util.check("data.from", f, "callable")
  util.check("data.from: n", n, "count")
  local where, first = util.frame(), {}
  local function field(name, value, i)
    if value == nil then return nil end
    local x = core.is_tensor(value) and value or core.tensor(value)
    local shape = util.show(x:shape())
    first[name] = first[name] or shape
    if shape ~= first[name] then
      util.fail_at(where, "data.from: the %s of sample %d have shape %s, those of the first %s; all need one shape", name, i,
        shape, first[name])
    end
    return x
  end
  local set = core.dataset { kind = "func", samples = n, func = function(i)
    local inputs, targets = f(i)
    return field("inputs", inputs, i), field("targets", targets, i)
  end }
  local o = options_of("from", options, {})
  local self = wrap("from", set, { transforms = o.transforms })
  self.about = "by " .. sources.of(f)
  return o.split and self:split(o.split) or self
end

--- data.synthetic: { inputs = shape, targets = shape, samples =, seed = } (a noisy linear map), { inputs = shape,
--- classes =, samples = } (clouds around centres) or { tokens = vocabulary, context =, samples = } (noisy arithmetic
--- sequences).
function data.synthetic(options)
  local o = options_of("synthetic", options, { { "inputs", "table" }, { "targets", "table" }, { "classes", "count" },
    { "tokens", "count" }, { "context", "count" }, { "samples", "count" }, { "seed", "integer", 0 } })
  local spec = { kind = "synthetic", samples = o.samples or 10000, seed = o.seed }
  if o.tokens then
    if not o.context then util.fail("data.synthetic { tokens = ... } needs context = ids in a sample") end
    spec.tokens, spec.context = o.tokens, o.context
  elseif o.inputs and o.classes then
    spec.inputs, spec.classes = o.inputs, o.classes
  elseif o.inputs and o.targets then
    spec.inputs, spec.targets = o.inputs, o.targets
  else
    util.fail("data.synthetic needs inputs and targets (shapes), inputs and classes, or tokens and context")
  end
  local self = wrap("synthetic", core.dataset(spec), o)
  self.tokens = o.tokens ~= nil
  return self
end

return util.strict(data, "data")
