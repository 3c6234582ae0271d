-- The closed forms against the tables that their sources print (arXiv 2205.05198, table 4 and figures; arXiv
-- 1910.02054, figure 1).
require "dtrain"
local formulas = require "dtrain.formulas"

describe("formulas", function()
  -- heads, hidden, layers, t, p, v, b: states, none, sequence, selective, sequence + selective, full; GiB
  for _, row in ipairs {
    { "22B", 64, 6144, 48, 8, 1, 1, 4, 45.5625, 59.2500, 39.5625, 29.2500, 9.5625, 4.5000 },
    { "175B", 96, 12288, 96, 8, 8, 3, 1, 45.5625, 66.8438, 41.4141, 37.7812, 12.3516, 5.8125 },
    { "530B", 128, 20480, 105, 8, 35, 3, 1, 31.6406, 114.0234, 66.5137, 70.5859, 23.0762, 10.8594 },
    { "1T", 160, 25600, 128, 8, 64, 1, 1, 32.9590, 131.2500, 76.5625, 81.2500, 26.5625, 12.5000 },
  } do
    it("give the memory of " .. row[1], function()
      local m = formulas.transformer { heads = row[2], hidden = row[3], layers = row[4], tensor = row[5],
        pipeline = row[6], chunks = row[7], micro = row[8], sequence = 2048 }
      for i, key in ipairs { "states", "none", "sequence", "selective", "sequence_selective", "full" } do
        assert.is_near(row[8 + i], m[key], 5.1e-5)
      end
    end)
  end
  it("give the bytes of ZeRO's stages", function()
    local expected = { 120, 31.4, 16.6, 1.88 } -- GB, 7.5e9 parameters, 64 ranks
    for stage = 0, 3 do
      assert.is_near(expected[stage + 1], formulas.zero_bytes(stage, 64) * 7.5, 0.05)
      assert.equal(stage == 3 and 3 or 2, formulas.zero_volume(stage))
    end
  end)
end)
