-- An op's whole life is in one place: its row, its family's file in runtime/ir and its kernels. No other C file knows an op by name
-- or by number, but for those below. So what a pass must know of an op stands in its row, and a new op is a row, rules and a kernel.
local support = require "support"

-- what passes, plans and bindings are made of, whatever the model: op = why others know it
local common = {
  fused = "what fuse makes of elementwise nodes", assign = "writes memory in place", copy = "moves data",
  concat = "moves data",
  pad = "moves data", full = "a constant", cast = "changes a dtype",
  add = "arithmetic that passes build", sub = "arithmetic", mul = "arithmetic", div = "arithmetic", neg = "arithmetic",
  pow = "Lua's ^",
  minimum = "arithmetic", exp = "arithmetic", log = "arithmetic", sqrt = "arithmetic", gt = "a comparison that passes build",
  where = "a choice that passes build", clamp = "clip_value of update",
  sum = "a reduction that optimizers take of shares", mean = "the same", norm = "the same",
  max = "the same", min = "the same", sum_squares = "the gradient's norm", matmul = "linear in its inputs, as prove must know",
}
-- op, file = why this file knows it
local known = {
  ["batch_norm runtime/pass/recompute.c"] = "in training it does not look at the running statistics that forward overwrites",
  ["vocab_stats runtime/pass/place_loss.c"] = "place builds it: cross_entropy over divided classes",
  ["vocab_loss runtime/pass/place_loss.c"] = "place builds it: cross_entropy over divided classes",
  ["linear runtime/pass/place_param.c"] = "a weight whose product is split is cut in each part",
  ["linear lua/l_op.c"] = "a method of its own takes the bias by place",
  ["arange runtime/pass/stage.c"] = "it costs nothing to make anew on each stage",
}

local function read(path)
  local f <close> = assert(io.open(path))
  return f:read "a"
end
-- { name = flags } of the rows that start with one of `kinds`; rows without a kernel (OPV) are leaves, views and
-- communication, which everybody knows
local function rows(path, kinds)
  local found = {}
  for kind, name in read(path):gmatch "\n([A-Z]+)%(([%w_]+)," do
    if kinds[kind] then found[name] = kind end
  end
  return found
end

describe("an op's life is in one place:", function()
  local ops = rows("runtime/ir/ops.def", { OP = true })
  for name in pairs(rows("kernels/elementwise.def", { EW = true })) do ops[name] = "EW" end
  local families = {}
  for _, name in ipairs { "elementwise", "view", "reduce", "product", "attention", "lookup", "norm", "image", "loss", "comm", "rules",
    "build", "graph", "print" } do
    families["runtime/ir/" .. name .. ".c"] = true
  end
  families["runtime/ir/rules.h"], families["runtime/ir/ir.h"] = true, true

  local seen = {} -- "op file" = line
  local _, files = support.sh "find runtime lua -name '*.c' -o -name '*.h'"
  for file in files:gmatch "%S+" do
    if not families[file] then
      local number = 0
      for line in (read(file) .. "\n"):gmatch "(.-)\n" do
        number = number + 1
        local code = line:gsub("/%*.-%*/", ""):gsub("^%s*%*.*", "")
        for name in code:gmatch "DT_OP_([%w_]+)" do seen[name .. " " .. file] = seen[name .. " " .. file] or number end
        for name in code:gmatch '"([%l%d_]+)"' do
          if ops[name] == "OP" and name:find "_" then seen[name .. " " .. file] = seen[name .. " " .. file] or number end
        end
      end
    end
  end

  it("there are ops, and uses of them, to look at", function()
    assert.is_truthy(ops.rms_norm == "OP" and ops.attention == "OP" and ops.gelu == "EW")
    assert.is_truthy(seen["fused runtime/pass/fuse.c"] and next(seen))
  end)
  it("no file outside of it knows an op", function()
    local bad = {}
    for key, line in pairs(seen) do
      local name, file = key:match "^(%S+) (%S+)$"
      if ops[name] and not common[name] and not known[key] then bad[#bad + 1] = ("%s:%d: %s"):format(file, line, name) end
    end
    table.sort(bad)
    assert.are.equal("", table.concat(bad, "\n"))
  end)
  it("what is excepted is still needed", function()
    local idle = {}
    for key in pairs(known) do
      if not seen[key] then idle[#idle + 1] = key end
    end
    for name in pairs(common) do
      local used = false
      for key in pairs(seen) do used = used or key:match "^%S+" == name end
      if not used then idle[#idle + 1] = name end
    end
    table.sort(idle)
    assert.are.equal("", table.concat(idle, "\n"))
  end)
end)
